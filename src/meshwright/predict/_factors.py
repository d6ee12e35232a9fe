"""Hold factors on predicted seconds, by class of work, that are fitted to the steps that a user measured.

`contrib.calibration` fits them, and says how. What is assumed before anything was measured is in runs.toml,
[factors].
Left out: hiding of messages changes with the factors, so a walk with them may differ from the sum of the
classes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.errors import InputError, nearest_name
from meshwright.hardware import COLLECTIVE_KINDS

if TYPE_CHECKING:
    from meshwright.hardware import Calibration, Chip, MeasuredRun

TAIL = 1.6449  # standard deviations of a normal variable that leave 5 % on one side
TAIL_OF_NOISE = 2.92  # scales of Student's t with them that leave 5 % on one side
RESOLVED = 0.5  # of the width before, below which measurements tell a class's rate

RECOMPUTED = "recomputed"
"""The factor of kernels that the backward pass runs again, beside that of their class."""

PRICED_AS_OTHERS = ("collective-permute", "ragged-all-to-all")
"""Collectives that no table has."""


def class_of(slice_name: str) -> str:
    """Return the class of work of a slice of a prediction: collectives by kind, without their axes.

    >>> class_of("all-gather[fsdp]"), class_of("matmul")
    ('all-gather', 'matmul')
    """
    return slice_name.partition("[")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Measured / predicted seconds of a class: the most probable value, and its 90 % range.

    That of `RECOMPUTED` comes on top of its kernels' own classes.

    `before`: the factor's width before anything was measured. `num_runs`: measured runs that have the class.
    """

    value: float
    low: float
    high: float
    before: float
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """The assumption about factors before anything is measured.

    `widths`: by class; what is a class's own in its factor lies nine times of ten between 1 / width and
    width. `whole_step`: the same of what all classes share; with the odds of `unusual_share` it is
    `unusual_step`.
    `between_programs`: the scale of what no factor explains in the logarithm of a step, which has Student's t
    distribution.
    """

    widths: Mapping[str, float]
    whole_step: float
    unusual_step: float
    unusual_share: float
    between_programs: float

    def width(self, name: str) -> float:
        """Return the width of a class.

        Raises:
            InputError: no class has this name.
        """
        kind = "collective" if name in (*COLLECTIVE_KINDS, *PRICED_AS_OTHERS) else name
        if kind not in self.widths:
            raise InputError(f"no class of work is called {name!r}", hint=nearest_name(name, self.widths))
        return self.widths[kind]

    def deviation(self, name: str) -> float:
        """Return the standard deviation of a class's own part of its log factor."""
        return math.log(self.width(name)) / TAIL

    @property
    def shared_deviation(self) -> float:
        """Return the standard deviation of the part that all classes' log factors share."""
        return math.log(self.whole_step) / TAIL

    def whole_width(self, name: str) -> float:
        """Return the width of a class's factor, including the part that classes share."""
        return math.exp(TAIL * math.hypot(self.shared_deviation, self.deviation(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of one chip by class, and the measured runs to which they were fitted.

    `shared`: what all classes share, which is the factor of a class that no run has.
    `covariance`: of the logarithms of `shared` and of `by_class`, in this order; of `RECOMPUTED`, of its own.
    `before`: what is assumed without any run.
    `set_aside`: the number of runs that were predicted with other rates and are not used.
    `scale`: what remains between programs, as a multiple of `before.between_programs`; above 1 where the
    measured steps disagree with each other more than their mixes of work explain.
    """

    runs: tuple[MeasuredRun, ...] = ()
    by_class: Mapping[str, Factor] = field(default_factory=dict[str, Factor])
    shared: float = 1.0
    covariance: tuple[tuple[float, ...], ...] = ()
    before: Prior | None = None  # None without any run
    set_aside: int = 0
    scale: float = 1.0

    def of(self, slice_name: str, *, is_recomputed: bool = False) -> float:
        """Return the factor of a class; `shared` for one that no measured run has.

        Args:
            is_recomputed: whether it is for kernels that the backward pass runs again.
        """
        known = self.by_class.get(class_of(slice_name))
        factor = self.shared if known is None else known.value
        return factor * self.again if is_recomputed else factor

    @property
    def again(self) -> float:
        """Return the additional factor of kernels that the backward pass recomputes."""
        known = self.by_class.get(RECOMPUTED)
        return 1.0 if known is None else known.value

    def least(self) -> float:
        """Return the smallest factor that any product may have which runs once, at most 1."""
        return min(1.0, *(self.of(name) for name in ("matmul", "attention", "convolution")))

    def resolves(self, name: str) -> bool:
        """Return whether measurements more than halved the uncertainty of a class."""
        known = self.by_class.get(name)
        return known is not None and math.log(known.high / known.value) < RESOLVED * math.log(known.before)

    def deviation(self, exposed_seconds: Mapping[str, float], recomputed_seconds: float) -> float:
        """Return the standard deviation of a step's log time, including the scatter between programs.

        Nine times of ten the logarithm is less than `TAIL` deviations off.

        Args:
            exposed_seconds: of the step's slices, with these factors.
            recomputed_seconds: what of them the backward pass runs again.
        """
        total = sum(exposed_seconds.values())
        shares: defaultdict[str, float] = defaultdict(float)
        for name, seconds in exposed_seconds.items():
            shares[class_of(name)] += seconds / total
        again = recomputed_seconds / total
        before = self.before
        assert before is not None, "no factors were fitted"
        known = [again if name == RECOMPUTED else shares.pop(name, 0.0) for name in self.by_class]
        weights = np.array([sum(shares.values()), *known])
        variance = float(weights @ np.array(self.covariance) @ weights)
        if RECOMPUTED not in self.by_class:
            shares[RECOMPUTED] = again
        variance += sum((share * before.deviation(name)) ** 2 for name, share in shares.items())
        return math.hypot(math.sqrt(variance), before.between_programs * self.scale * TAIL_OF_NOISE / TAIL)

    def source(self) -> str:
        """Return the measured runs in words: "2 measured steps kept on this machine (2026-11-23)"."""
        dates = sorted({run.date for run in self.runs})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        steps = "1 measured step" if len(self.runs) == 1 else f"{len(self.runs)} measured steps"
        return f"{steps} kept on this machine ({when})"

    def words(self) -> str:
        """Return the factors in words: "times factors of 2 measured steps ...: matmul x1.08"."""
        moved = {name: f"x{factor.value:.2f}" for name, factor in self.by_class.items()}
        values = [f"{name} {value}" for name, value in moved.items() if value != "x1.00"]
        return f"times factors of {self.source()}: {', '.join(values) if values else 'all x1.00'}"


NO_FACTORS = Factors()


def before_measuring(table: Mapping[str, Any], *, products: float | None, is_cpu: bool, usual: bool) -> Prior:
    """Return what is assumed of factors before anything is measured.

    Args:
        table: [factors] of runs.toml.
        products: the width of the chip's interval; None where no source bounds the error.
        usual: whether published runs say how far a whole step on such a chip is off; else it may be unusual.
    """
    widths: dict[str, float] = dict(table["widths"])
    without_source, on_cpu = widths.pop("products_without_source"), widths.pop("on_cpu")
    shared = {name: widths.pop(name) for name in ("whole_step", "unusual_step", "unusual_share")}
    if not usual:
        shared["whole_step"] = shared["unusual_step"]
    if is_cpu:
        widths = {name: max(width, on_cpu) for name, width in widths.items()}
    widths["matmul"] = without_source if products is None else products
    return Prior(widths=widths, between_programs=table["between_programs"], **shared)


def digest_of(chip: Chip, calibration: Calibration | None, *tables: Mapping[str, Any]) -> str:
    """Return a digest of all rates that price a step: the chip's, the measured ones, and the tables."""
    rates = None if calibration is None else dataclasses.asdict(calibration)
    links = [
        None if link is None else link.bytes_per_second for link in (chip.inside, chip.between, chip.host)
    ]
    figures: list[Any] = [
        RECOMPUTED,  # steps that were kept before this was told apart hold no longer
        dict(chip.peak_flops_per_second),
        chip.memory_bytes_per_second,
        links,
        rates,
        *tables,
    ]
    if chip.inside is not None and chip.inside.by_group:
        figures.append(chip.inside.by_group)
    return hashlib.sha256(json.dumps(figures, sort_keys=True, default=str).encode()).hexdigest()[:16]
