"""Show the progress of `train`: a bar on a terminal, and lines to follow in a file or a pipe."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.run_lines import LOG_EVERY, LogEvery, RunLog, bar_state, plain_lines

from ._console import console

if TYPE_CHECKING:
    from rich.progress import Progress

    from meshwright.run_lines import Event

COMMAND = "MESHWRIGHT_COMMAND"  # the environment variable by which a child process knows the typed command


@contextmanager
def progress(config: str, on: str, log_every: LogEvery | None) -> Iterator[Callable[[Event], None]]:
    """Yield a function that shows each event of a run.

    Notices and the comparison of the first steps are lines on stderr. A terminal also shows a bar. Elsewhere,
    or if `log_every` is given, everything else is lines as well.
    """
    terminal = sys.stderr.isatty()
    log = RunLog(log_every or LOG_EVERY, _print) if log_every is not None or not terminal else None

    def on_event(event: Event) -> None:
        if log is not None:
            log.event(event)
            return
        for line in plain_lines(event):
            _print(line)

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


def _print(line: str) -> None:
    print(line, file=sys.stderr)


def bars() -> Progress:
    """Return progress bars on stderr, to be used in a `with` statement, that disappear at its end."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(bar_width=24), TimeElapsedColumn())
    return Progress(*columns, console=console(stderr=True), transient=True)


def how_to_go_on(folder: Path, step: int) -> str:
    """Return the command that resumes a run stopped after `step`, and the step from which it starts."""
    from meshwright.trainer.checkpoint import steps_in

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
