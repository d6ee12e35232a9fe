"""Hold and show the result of `calibrate`: the factors of a chip, and each measured step before and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.predict import Interval
from meshwright.report import Document, ReportTable, Words, percent, plain_rows, section
from meshwright.reportable import Reportable
from meshwright.units import format_seconds

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedStep:
    """One measured step, with its prediction before and after it was known.

    `what`: "step time" or "trace". `matched`: the share of the trace's kernel time that was matched with the
    program; None without a trace. `notes`: what of the trace was not used.
    """

    program: str
    fleet: str
    what: str
    measured_seconds: float
    before: Interval
    after: Interval
    matched: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedClass:
    """One class of work: its seconds in the last measured step, and its factor, measured / predicted.

    `predicted_seconds`: all of a step's, hidden or not, with a factor of 1; 0 if the last program has none.
    `measured_seconds`: by a trace; None without one.
    `low`, `high`: the 90 % range of the factor. `before`: the range before anything was measured, 1 / before
    to before. `num_runs`: measured runs that have the class.
    """

    name: str
    predicted_seconds: float
    measured_seconds: float | None
    factor: float
    low: float
    high: float
    before: float
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Calibrated(Reportable):
    """The result of `calibrate`: the factors of a chip, which predictions use from now on.

    `file`: where the measured steps are kept. `num_runs`: how many the factors are fitted to. `set_aside`:
    how many were compared with other rates than today's and are not used.
    """

    chip: str
    file: str
    num_runs: int
    set_aside: int
    steps: tuple[CalibratedStep, ...]
    classes: tuple[CalibratedClass, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `calibrate --json` prints (docs/how-to/calibration.md)."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def document(self) -> Document:
        """Return the factors by class, then each measured step before and after."""
        numbers = ("predicted", "measured", "factor", "90 % range", "steps")
        classes = [
            (
                each.name,
                format_seconds(each.predicted_seconds),
                "" if each.measured_seconds is None else format_seconds(each.measured_seconds),
                f"x{each.factor:.2f}",
                f"{each.low:.2f} to {each.high:.2f}",
                str(each.num_runs),
            )
            for each in self.classes
        ]
        steps = [_step_cells(step) for step in self.steps]
        columns = ("step of", "measured", "error before", "error after", "after")
        kept = f"Fitted to {_steps(self.num_runs)}, kept in {self.file}."
        aside = f"{_steps(self.set_aside)} set aside: compared with other rates than today's."
        return Document(
            title=f"{self.chip}:",
            facts="predictions use these factors from now on",
            sections=(
                *section(
                    "Classes",
                    ReportTable(columns=("class", *numbers), rows=plain_rows(classes), numbers=numbers),
                ),
                *section("Steps", ReportTable(columns=columns, rows=plain_rows(steps), numbers=columns[1:])),
                *section("", *_notes(self.steps)),
                *section(
                    "",
                    Words(text=kept),
                    Words(text=aside, tone="warning") if self.set_aside else None,
                    Words(text="Without them again: meshwright calibrate --forget --on FLEET.", tone="faint"),
                ),
            ),
        )


def _steps(number: int) -> str:
    return "1 measured step" if number == 1 else f"{number} measured steps"


def _step_cells(step: CalibratedStep) -> tuple[str, str, str, str, str]:
    measured = step.measured_seconds
    before, after = (f"{100 * (each.expected / measured - 1):+.1f} %" for each in (step.before, step.after))
    place = f"{step.program} on {step.fleet}"
    return place, format_seconds(measured), before, after, _interval(step.after)


def _interval(interval: Interval) -> str:
    words = format_seconds(interval.expected)
    if interval.low is None or interval.high is None:
        return words
    low, high = (format_seconds(end, like=interval.expected) for end in (interval.low, interval.high))
    return f"{words} ({low} to {high})"


def _notes(steps: Iterable[CalibratedStep]) -> Iterator[Words]:
    for step in steps:
        if step.matched is not None:
            yield Words(text=f"{percent(step.matched, 1)} of the trace's kernel time has a class by name.")
        yield from (Words(text=note, tone="faint") for note in step.notes)
