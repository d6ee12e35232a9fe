"""Show the progress of `train`: a bar on a terminal, and lines to follow in a file or a pipe."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.units import format_bytes, format_count, format_seconds

from ._console import console

if TYPE_CHECKING:
    from rich.progress import Progress

    from meshwright.reconciliation import Row
    from meshwright.results import FirstStepsCompared, Phase, SweepRunStarted
    from meshwright.training import Event as TrainingEvent

    Event = TrainingEvent | Phase | FirstStepsCompared | SweepRunStarted

COMMAND = "MESHWRIGHT_COMMAND"  # the environment variable by which a child process knows the typed command
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvery:
    """The interval between printed steps: a number of steps or of seconds."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> LogEvery:
        """Parse "50" (steps), "30s", "5m" or "1h".

        Raises:
            InputError: the text is none of these, or zero.
        """
        match = re.fullmatch(r"([0-9]{1,9})([smh]?)", text.strip())
        if match is None or not int(match[1]):
            raise InputError(
                f"--log-every {text!r} is neither steps nor a time",
                hint="use a number of steps, as in 50, or a time: 30s, 5m, 1h",
            )
        number = int(match[1])
        return cls(seconds=number * UNITS[match[2]]) if match[2] else cls(steps=number)


LOG_EVERY = LogEvery(seconds=30.0)  # if no terminal shows a bar


class RunLog:
    """Print a run's events as lines on stderr, each with the time of day in UTC.

    Args:
        every: the interval between printed steps; the first and the last are always printed.
    """

    def __init__(self, every: LogEvery, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every, now
        self._last_seconds: float | None = None  # when the last step was printed

    def say(self, words: str) -> None:
        """Print a line."""
        print(f"{datetime.now(UTC):%H:%M:%S} {words}", file=sys.stderr)

    def event(self, event: Event) -> None:
        """Print an event, unless it is a step that is not due."""
        from meshwright.training import Finished, Started, StepCompiled, StepDone

        words = bar_state(event).get("description", "")
        match event:
            case Started():
                size = format_count(event.num_parameters)
                words += f": {size} parameters, {event.steps} steps, files in {event.folder}"
            case StepCompiled():
                words = f"compiled in {format_seconds(event.seconds)}"
            case StepDone() if not self._due(event):
                return
            case Finished():
                words = f"{'stopped' if event.interrupted else 'finished'} after {event.steps} steps"
        if words:
            self.say(words)

    def _due(self, event: Any) -> bool:
        now, before = self._now(), self._last_seconds
        every_seconds, every_steps = self._every.seconds, self._every.steps
        due = before is None or event.step == event.steps
        due |= every_steps is not None and event.step % every_steps == 0
        due |= every_seconds is not None and before is not None and now - before >= every_seconds
        if due:
            self._last_seconds = now
        return due


@contextmanager
def progress(config: str, on: str, log_every: LogEvery | None) -> Iterator[Callable[[Event], None]]:
    """Yield a function that shows each event of a run.

    Notices and the comparison of the first steps are lines on stderr. A terminal also shows a bar. Elsewhere,
    or if `log_every` is given, everything else is lines as well.
    """
    from meshwright.training import Noticed

    terminal = sys.stderr.isatty()
    log = RunLog(log_every or LOG_EVERY) if log_every is not None or not terminal else None

    def say(line: str) -> None:
        log.say(line) if log is not None else print(line, file=sys.stderr)

    def on_event(event: Event) -> None:
        for line in plain_lines(event):
            say(line)
        if isinstance(event, Noticed):
            say(f"{event.kind}: {event.message}")
            if event.hint:
                print(f"hint: {event.hint}", file=sys.stderr)
        elif log is not None:
            log.event(event)

    if log is not None:
        log.say(f"training {config} on {on} ({datetime.now(UTC):%Y-%m-%d}, UTC)")
    if not terminal:
        yield on_event
        return
    with bars() as bar:
        task = bar.add_task(f"weighing {config} on {on}", total=None)

        def on_bar_event(event: Event) -> None:
            on_event(event)
            bar.update(task, **bar_state(event))

        yield on_bar_event


def bars() -> Progress:
    """Return progress bars on stderr, to be used in a `with` statement, that disappear at its end."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(bar_width=24), TimeElapsedColumn())
    return Progress(*columns, console=console(stderr=True), transient=True)


def first_steps_line(rows: tuple[Row, ...]) -> str:
    """Return a line that compares each measured quantity of the first steps with its prediction."""
    from meshwright.report import row_cells

    parts: list[str] = []
    for row in rows:
        _, predicted, measured, error, _ = row_cells(row)
        where = {True: ", inside the interval", False: ", outside the interval", None: ""}[row.inside]
        parts.append(f"{row.quantity} {measured} (predicted {predicted}, {error}{where})")
    return "first steps: " + "; ".join(parts)


def plain_lines(event: Event) -> list[str]:
    """Return the lines that a terminal shows too: of each source of tokens, and of the first steps."""
    from meshwright.results import FirstStepsCompared
    from meshwright.training import Started

    if isinstance(event, FirstStepsCompared):
        return [first_steps_line(event.rows)]
    if not isinstance(event, Started):
        return []
    return [
        f"{source.name}: {format_count(source.num_tokens)} tokens to train on, "
        f"{100 * source.share:.3g} % of the sequences, {source.epochs:.3g} epochs"
        for source in event.sources
    ]


def bar_state(event: Event) -> dict[str, Any]:
    """Return the state of a progress bar after `event`: its description, and how far the run is."""
    from meshwright.results import Phase
    from meshwright.training import CheckpointSaved, EpochDone, Evaluated, Started, StepCompiled, StepDone

    match event:
        case Phase():
            return {"description": f"{event.of}: {event.name}"}
        case Started():
            return {"description": f"compiling {event.name} for {event.num_devices} x {event.device_kind}"}
        case StepCompiled():
            return {"description": "first step"}
        case StepDone():
            more = "".join(f", {name} {value:.3f}" for name, value in event.metrics.items())
            mfu = "" if event.mfu is None else f", MFU {100 * event.mfu:.1f} %"
            words = (
                f"step {event.step} of {event.steps}, loss {event.loss:.3f}{more}, "
                f"{format_count(event.tokens_per_second)} tokens/s{mfu}, "
                f"{format_seconds(event.seconds_left)} left"
            )
            return {"description": words, "completed": event.step, "total": event.steps}
        case Evaluated():
            more = "".join(f", held-out {name} {value:.3f}" for name, value in event.metrics.items())
            return {"description": f"step {event.step}, held-out loss {event.held_out_loss:.3f}{more}"}
        case EpochDone():
            means = "".join(f", {name} {value:.3f}" for name, value in event.metrics.items())
            return {"description": f"epoch {event.epoch} in {format_seconds(event.seconds)}{means}"}
        case CheckpointSaved():
            size, seconds = format_bytes(event.num_bytes), format_seconds(event.write_seconds)
            return {"description": f"checkpoint of step {event.step} saved, {size} in {seconds}"}
        case _:
            return {}


def how_to_go_on(folder: Path, step: int) -> str:
    """Return the command that resumes a run stopped after `step`, and the step from which it starts."""
    from meshwright.checkpoint import steps_in

    checkpoints = folder / "checkpoints"
    saved = steps_in(checkpoints) if checkpoints.is_dir() else []
    newest = saved[-1] if saved else 0
    loses = newest < step
    words = (
        f"resume from the checkpoint of step {newest}" if saved else "no checkpoint: begin again at step 0"
    )
    return f"{words}:\n    {shlex.join(resuming(_own_command(), folder, discards=loses))}"


def resuming(command: list[str], folder: Path, *, discards: bool) -> list[str]:
    """Return a `train` command that resumes the run in `folder`, of which steps may have to be discarded."""
    words = [word for word in command if word not in ("--resume", "--discard-steps")]
    if not any(word == "--folder" or word.startswith("--folder=") for word in words):
        words += ["--folder", str(folder)]
    return [*words, "--resume", *(["--discard-steps"] if discards else [])]


def own_command_for_children() -> dict[str, str]:
    """Return the environment variable by which child processes know the command that was typed."""
    return {COMMAND: os.environ.get(COMMAND) or json.dumps(sys.argv)}


def _own_command() -> list[str]:
    """Return the words that were typed, as far as Python knows them."""
    program, *arguments = json.loads(os.environ[COMMAND]) if COMMAND in os.environ else sys.argv
    if program.endswith("__main__.py"):
        return [sys.executable, "-m", "meshwright", *arguments]
    name = Path(program).name
    return [name if shutil.which(name) == program else program, *arguments]
