"""Define what `plan` returns, and the event that it emits.

A `Planned` is a candidate that was compiled; a `Plan` holds those of one fleet, and the weighing of the best.
They print as their reports, as all results do.

Imports: `results`, `config`, `hardware`, `predict`. Used by: `report`, `api`, `cli` and
`contrib.fleet_plans`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .config import RunConfig, holds_nothing, overridden
from .errors import InputError
from .hardware import Fleet
from .predict import Interval, Prediction
from .reportable import Reportable
from .results import Change, Finishes, Weighing
from .units import format_seconds

PLAN_SCHEMA = 2
STOPPED = "stopped by Ctrl-C"  # why a search ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One candidate of a plan that was compiled, or that failed to be.

    `settings`: everything but the layout in words. `overrides`: the changes to the run that make it this
    candidate; for a function its layout and knobs. `allowance_bytes`: what a device needs beside the program.
    `usable_bytes`: as `weigh` has them, None where the chip's memory is not known. `step_seconds`,
    `reserved_bytes` and `model_flops` are those of its compiled program, None if it failed for the reason in
    `failed`. `estimated_...`: the closed form's, before any correction; None for a function, which has none.
    `prediction`: of the compiled program. `finish`: when its run is finished, if that was asked.
    """

    layout: str
    settings: str
    overrides: dict[str, Any]
    estimated_seconds: float | None
    estimated_bytes: float | None
    model_flops: int | None
    reserved_bytes: int | None
    allowance_bytes: int | None
    usable_bytes: int | None
    prediction: Prediction | None
    cached: bool
    failed: str
    finish: Finishes | None = None

    @property
    def step_seconds(self) -> Interval | None:
        """Predicted seconds of a step; None if none is predicted."""
        return None if self.prediction is None else self.prediction.step_seconds

    @property
    def needed_bytes(self) -> int | None:
        """Bytes of one device that the program reserves, plus the allowance; None if it failed."""
        if self.reserved_bytes is None or self.allowance_bytes is None:
            return None
        return self.reserved_bytes + self.allowance_bytes

    @property
    def fits(self) -> bool | None:
        """True if the memory suffices, as `weigh` counts it; None if it failed or is not known."""
        if self.needed_bytes is None or self.usable_bytes is None:
            return None
        return self.needed_bytes <= self.usable_bytes

    @property
    def words(self) -> str:
        """Layout and settings: "fsdp=8, microbatch 1, remat full"."""
        return ", ".join(filter(None, (self.layout, self.settings)))

    def to_dict(self) -> dict[str, Any]:
        """Return the candidate in JSON's types."""
        fields = dataclasses.asdict(dataclasses.replace(self, finish=None))
        if self.finish is not None:
            whole = self.finish.to_dict(datetime.now())
            fields["finish"] = {name: whole[name] for name in ("finish_date", "useful_share")}
        return {**fields, "needed_bytes": self.needed_bytes, "fits": self.fits}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Reportable):
    """The layouts and settings of one run on one fleet that were compiled, and the best of them.

    `config`: the run; or "package.module:function", whose meshes and knobs these are.
    `num_layouts`: ways to divide the devices over the axes. `num_considered`: legal candidates, all with an
    estimate. `removed`: what was left out, by rule. `num_open`: candidates that neither a bound removed nor
    anyone compiled. `candidates`: compiled or failed, in that order of time; the last may be an earlier one
    without its loop over layers. `best`: the weighing of the fastest that fits. `ended`: why the search
    ended. `price`: where the price of a device-hour comes from, if it was not given. `of_tokens`: the steps
    of the tokens that were asked for, and what else of the run must then change, with `notes` in words.
    `suggestions`: where nothing fits, changes after which one does. `smaller`: smaller fleets, if asked for,
    each with why not.
    """

    config: RunConfig | str
    fleet: Fleet
    num_layouts: int
    num_considered: int
    removed: dict[str, int]
    num_open: int
    candidates: tuple[Planned, ...]
    best: Weighing | None
    ended: str
    seconds: float
    price: str = ""
    of_tokens: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    notes: tuple[str, ...] = ()
    suggestions: tuple[Change, ...] = ()
    smaller: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """Name of the run, or of the function."""
        return self.config if isinstance(self.config, str) else self.config.name

    @property
    def line(self) -> str:
        """The run, the fleet, and the fastest candidate that fits with its time."""
        best = self.winner
        seconds = None if best is None else best.step_seconds
        found = "nothing fits" if best is None else f"best {best.words}"
        time = "" if seconds is None else f", step {format_seconds(seconds.expected)}"
        return f"{self.name} on {self.fleet.name}: {found}{time}"

    @property
    def price_per_step(self) -> float | None:
        """Price of one step of the best on the whole fleet; None without a price or if nothing fits."""
        winner, price = self.winner, self.fleet.price_per_device_hour
        if winner is None or winner.step_seconds is None or price is None:
            return None
        return winner.step_seconds.expected / 3600 * self.fleet.num_devices * price

    @property
    def interrupted(self) -> bool:
        """Tell whether Ctrl-C ended the search."""
        return self.ended == STOPPED

    @property
    def ranked(self) -> tuple[Planned, ...]:
        """Candidates by predicted seconds: those that fit, then those that do not, then the failed ones."""

        def place(candidate: Planned) -> tuple[int, float]:
            seconds = candidate.step_seconds
            if candidate.failed or seconds is None:
                return 2, 0.0
            return int(candidate.fits is False), seconds.expected

        return tuple(sorted(self.candidates, key=place))

    @property
    def fitting(self) -> tuple[Planned, ...]:
        """Compiled candidates that fit, or whose chip's memory is not known, the fastest first."""
        return tuple(c for c in self.ranked if c.step_seconds is not None and c.fits is not False)

    @property
    def winner(self) -> Planned | None:
        """The fastest candidate that fits; None if none does."""
        return next(iter(self.fitting), None)

    @property
    def front(self) -> tuple[Planned, ...]:
        """Candidates than which no other is both faster and smaller, the fastest first; they need not fit."""
        front: list[Planned] = []
        least: float = math.inf
        timed = [
            (seconds.expected, size, place)
            for place, each in enumerate(self.candidates)
            if (seconds := each.step_seconds) is not None and (size := each.needed_bytes) is not None
        ]
        for _, size, place in sorted(timed):
            if size < least:
                least = size
                front.append(self.candidates[place])
        return tuple(front)

    def is_tie(self, candidate: Planned) -> bool:
        """Return whether a candidate's interval overlaps the winner's."""
        winner = self.winner
        if winner is None or winner.step_seconds is None or candidate.step_seconds is None:
            return False
        low, high = candidate.step_seconds.low, winner.step_seconds.high
        return candidate is not winner and (low is None or high is None or low <= high)

    @property
    def simplest(self) -> Planned | None:
        """The simplest candidate of a run whose interval overlaps the winner's; the winner if no other is.

        Simple is what has few axes, then no stages, offload, ZeRO-1 or list of results to keep; of equally
        simple ones the fastest. None if nothing fits, and for a function, whose knobs are its own.
        """
        if isinstance(self.config, str):
            return None
        close = [each for each in self.fitting if each is self.winner or self.is_tie(each)]
        return min(close, key=_complexity, default=None)

    def to_toml(self) -> str:
        """Return the run with the winner's layout and settings, as a file that `train` runs.

        It has the steps of the tokens that were asked for, and only what differs from the defaults.

        Raises:
            InputError: nothing fits, or the plan is of a function.
        """
        if isinstance(self.config, str):
            raise InputError(
                f"{self.config} is not a configuration that `train` could run",
                hint="make the mesh of the best in your own script, and pass the function its knobs",
            )
        if self.best is None or self.best.config is None:
            raise InputError(
                f"no candidate of {self.name} fits {self.fleet.name}", hint="plan for more devices"
            )
        run = overridden(self.best.config, self.of_tokens)
        about = [f"Planned by meshwright for {self.fleet.name}: {self.ended}.", *self.notes]
        if holds_nothing(run):
            about.append("It reads random tokens: `meshwright train FILE --data PATH` names your own.")
        if run.steps is None:
            about.append("It has no steps: `meshwright train FILE --steps 1000` says when it ends.")
        from .registry import room

        commented_toml: Any = room("key_docs").commented_toml
        return commented_toml(run, about="\n".join(about), changed_only=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `plan --json` prints; docs/how-to/planning.md explains its fields."""
        winner = self.winner
        return {
            "schema": PLAN_SCHEMA,
            "config": self.name,
            "fleet": self.fleet.name,
            "num_layouts": self.num_layouts,
            "num_considered": self.num_considered,
            "removed": self.removed,
            "num_open": self.num_open,
            "num_compiled": sum(not candidate.failed for candidate in self.candidates),
            "num_failed": sum(bool(candidate.failed) for candidate in self.candidates),
            "ended": self.ended,
            "seconds": self.seconds,
            "price": self.price,
            "notes": list(self.notes),
            "price_per_step": self.price_per_step,
            "best": None if winner is None else winner.to_dict(),
            "simplest": None if self.simplest is None else self.simplest.to_dict(),
            "weighing": None if self.best is None else self.best.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.ranked],
            "front": [str(candidate.layout) for candidate in self.front],
            "suggestions": [change.to_dict() for change in self.suggestions],
            "smaller": self.smaller,
        }


def _complexity(candidate: Planned) -> tuple[int, int]:
    """Return the axes of a candidate's layout, and how many settings are not the plain ones."""
    chosen = candidate.overrides
    several = sum(int(axis.partition("=")[2]) > 1 for axis in candidate.layout.split(","))
    plain = (
        "stage=" not in candidate.layout,
        chosen.get("offload", "none") == "none",
        not chosen.get("zero1"),
        not str(chosen.get("remat", "")).startswith("save:"),
    )
    return several, plain.count(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """The event that a planner's search moved on.

    `best`: the fastest candidate that fits so far. `running`: what is being compiled now, in words. `of`:
    what is searched for, where that is not the plan itself.
    """

    num_considered: int
    num_compiled: int
    num_failed: int
    best: Planned | None
    running: tuple[str, ...]
    seconds: float
    budget_seconds: float
    of: str = ""
