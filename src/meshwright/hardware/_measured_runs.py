"""Hold the steps of programs that a user measured on a chip, by `calibrate` or by training.

`predict` fits factors to them. The records keep what a fit needs, so that runs can be added in any order.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from meshwright.errors import InputError
from meshwright.json_records import EXACT, read_record

_SCHEMA = 1  # of measured runs
STEP_TIME, TRACE = "step time", "trace"
SHORTEST_STEP_SECONDS, LONGEST_STEP_SECONDS = 1e-8, 1e7  # beyond them, a figure is no step's
ROUNDED = 1e-6  # by how much a part may exceed its whole
_AGAIN = "`meshwright calibrate --forget --on FLEET` removes it; then calibrate again"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredClass:
    """Seconds of one class of work in a step on one device, hidden or not: from a trace, and predicted."""

    __pydantic_config__ = EXACT
    measured_seconds: float
    predicted_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One measured step of a program, and its prediction with all factors at 1.

    `what`: "step time" or "trace".
    `fingerprint`: that of the compiled program.
    `rates`: the digest of the rates that priced the prediction.
    `exposed_seconds`: predicted, by class of work. They sum to `predicted_seconds`.
    `recomputed_seconds`: of these, what the backward pass runs again.
    `classes`: the classes that a trace timed; empty without a trace.

    Raises:
        InputError: a number of seconds is not finite and positive (zero is allowed for a class).
    """

    __pydantic_config__ = EXACT
    what: str
    program: str
    fleet: str
    fingerprint: str
    rates: str
    date: str  # YYYY-MM-DD
    measured_seconds: float
    predicted_seconds: float
    exposed_seconds: dict[str, float] = field(hash=False)
    classes: dict[str, MeasuredClass] = field(default_factory=dict[str, MeasuredClass], hash=False)
    recomputed_seconds: dict[str, float] = field(default_factory=dict[str, float], hash=False)

    def __post_init__(self) -> None:
        if self.what not in (STEP_TIME, TRACE):
            raise InputError(f"a measured run of the kind {self.what!r}", hint=_AGAIN)
        positive = {"measured_seconds": self.measured_seconds, "predicted_seconds": self.predicted_seconds}
        for name, timed in self.classes.items():
            positive[f"classes.{name}.measured_seconds"] = timed.measured_seconds
            positive[f"classes.{name}.predicted_seconds"] = timed.predicted_seconds
        for name, seconds in positive.items():
            if not 0 < seconds <= LONGEST_STEP_SECONDS:
                what = (
                    f"measured run: {name} = {seconds} is no number of seconds up to {LONGEST_STEP_SECONDS:g}"
                )
                raise InputError(what, hint=_AGAIN)
        for name, seconds in self.exposed_seconds.items():
            if not 0 <= seconds <= LONGEST_STEP_SECONDS:
                raise InputError(f"measured run: exposed_seconds.{name} = {seconds}", hint=_AGAIN)
        for name, seconds in self.recomputed_seconds.items():
            if not 0 <= seconds <= self.exposed_seconds.get(name, 0.0) * (1 + ROUNDED):
                raise InputError(f"measured run: recomputed_seconds.{name} = {seconds}", hint=_AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRuns:
    """All measured runs on one chip of the catalog; for a CPU, on one host.

    >>> MeasuredRuns(chip="H100", runs=()).to_json()
    '{"schema": 1, "chip": "H100", "runs": []}'
    """

    chip: str
    runs: tuple[MeasuredRun, ...]

    def adding(self, run: MeasuredRun) -> MeasuredRuns:
        """Return the runs with one more, in place of an earlier one of the same program on the same fleet."""
        kept = (each for each in self.runs if (each.fingerprint, each.fleet) != (run.fingerprint, run.fleet))
        return dataclasses.replace(self, runs=(*kept, run))

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads."""
        indent = 1 if self.runs else None
        return json.dumps({"schema": _SCHEMA, **dataclasses.asdict(self)}, indent=indent)

    @staticmethod
    def from_json(text: str) -> MeasuredRuns:
        """Read the text that `to_json` writes.

        Raises:
            InputError: the text is not such a JSON object, has another schema, or holds an impossible value.
        """
        return read_record(MeasuredRuns, text, name="a list of measured runs", schema=_SCHEMA, hint=_AGAIN)
