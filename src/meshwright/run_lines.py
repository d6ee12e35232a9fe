"""Say the events of a run in lines: for a pipe, for a bar's description, and for the log of a run's folder.

Imports: `units`, `errors`; `trainer.loop`, `results` and `report` late. Used by: `api`, `cli`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .errors import InputError
from .units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from .measure import Row
    from .results import FirstStepsCompared, Phase
    from .trainer.loop import Event as TrainingEvent

    Event = TrainingEvent | Phase | FirstStepsCompared

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
    """Say a run's events in lines, each with the time of day in UTC.

    Args:
        every: the interval between steps that are said; the first and the last always are.
        write: the function that writes a line.
    """

    def __init__(
        self, every: LogEvery, write: Callable[[str], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._every, self._write, self._now = every, write, now
        self._last_seconds: float | None = None  # when the last step was said

    def say(self, words: str) -> None:
        """Write a line."""
        self._write(f"{datetime.now(UTC):%H:%M:%S} {words}")

    def event(self, event: Event) -> None:
        """Say an event, unless it is a step that is not due."""
        from .trainer.loop import Finished, Started, StepCompiled, StepDone

        for line in plain_lines(event):
            self.say(line)
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


def bar_state(event: Event) -> dict[str, Any]:
    """Return the state of a progress bar after `event`: its description, and how far the run is."""
    from .results import Phase
    from .trainer.loop import CheckpointSaved, EpochDone, Evaluated, Started, StepCompiled, StepDone

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
                f"{format_count(event.tokens_per_second)} {event.batch_unit}/s{mfu}, "
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


def plain_lines(event: Event) -> list[str]:
    """Return the lines that a terminal shows too: notices, each source of tokens, and the first steps."""
    from .results import FirstStepsCompared
    from .trainer.loop import Noticed, Started

    if isinstance(event, FirstStepsCompared):
        return [first_steps_line(event.rows)]
    if isinstance(event, Noticed):
        hint = f" (hint: {event.hint})" if event.hint else ""
        return [f"{event.kind}: {event.message}{hint}"]
    if not isinstance(event, Started):
        return []
    return [
        f"{source.name}: {format_count(source.num_tokens)} tokens to train on, "
        f"{100 * source.share:.3g} % of the sequences, {source.epochs:.3g} epochs"
        for source in event.sources
    ]


def first_steps_line(rows: tuple[Row, ...]) -> str:
    """Return a line that compares each measured quantity of the first steps with its prediction."""
    from .report import row_cells

    parts: list[str] = []
    for row in rows:
        _, predicted, measured, error, _ = row_cells(row)
        where = {True: ", inside the interval", False: ", outside the interval", None: ""}[row.inside]
        parts.append(f"{row.quantity} {measured} (predicted {predicted}, {error}{where})")
    return "first steps: " + "; ".join(parts)
