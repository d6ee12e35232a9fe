"""Fit factors on predicted seconds, by class of work, to the steps that a user measured.

All measured runs are fitted at once: the result is the most probable set of factors, given what is assumed
before (runs.toml, [factors]) and the measurements. Write x for the logarithms of the factors. Before, each
is the sum of two normal variables around 0: one that all classes share, because other clocks, other software
and waiting slow a whole step, and one of its own. A measured step of m seconds says that
sum over classes of exp(x) e = m, with e the predicted exposed seconds; a class that a trace timed says that
exp(x) is measured / predicted. Kernels that the backward pass runs again have one more factor, whatever their
class: stacks differ in what they keep, and in how they run it again. All hold up to noise of the logarithm.
That of a class in a trace is normal. That of step times has heavier tails (Student's t), so that one odd
step among others is believed less. The maximum is found by Gauss-Newton steps with weights; the inverse of
its curvature is taken as the covariance (Laplace's approximation). So one step time moves all classes, those
most that take much of the step and are wide, and several steps of different mixes tell classes apart. Where
steps disagree more than that explains, the noise of step times is multiplied by the scale that the
measurements make most probable, which widens every interval.
Left out: hiding of messages changes with the factors, so a walk with them may differ from the sum above.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, nearest_name
from meshwright.hardware import COLLECTIVE_KINDS

if TYPE_CHECKING:
    from meshwright.hardware import Calibration, Chip, MeasuredRun, MeasuredRuns

TAIL = 1.6449  # standard deviations of a normal variable that leave 5 % on one side
FREEDOM = 2  # degrees of freedom of the noise of step times (runs.toml, [factors])
TAIL_OF_NOISE = 2.92  # scales of Student's t with them that leave 5 % on one side
MOST_ROUNDS = 50
SMALL_STEP = 1e-9  # of a logarithm
RESOLVED = 0.5  # of the width before, below which measurements tell a class's rate

SCALES = tuple(2 ** (power / 2) for power in range(10 + 1))
"""Multiples of the noise of step times that are tried: 1 to 32."""
SCALE_POWER = 1
"""A scale s of the noise is taken to be as probable as s to the minus this power before: an assumption."""

RECOMPUTED = "recomputed"
"""The factor of kernels that the backward pass runs again, beside that of their class."""

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


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


def fit_factors(runs: MeasuredRuns | None, rates: str, before: Prior) -> Factors:
    """Return the factors of all runs that were predicted with the present rates.

    Args:
        rates: the digest of the present rates, from `digest_of`.
        before: what is assumed of the factors, from `before_measuring`.

    Raises:
        InputError: a run has a class of work that is none.
    """
    if runs is None:
        return NO_FACTORS
    used = tuple(run for run in runs.runs if run.rates == rates)
    set_aside = len(runs.runs) - len(used)
    if not used:
        return Factors(before=before, set_aside=set_aside)
    names = sorted({name for run in used for name in (*run.exposed_seconds, *run.classes)})
    names += [RECOMPUTED] if any(run.recomputed_seconds for run in used) else []
    place = {name: number for number, name in enumerate(names, 1)}  # 0 is what all classes share
    scales = SCALES if _can_disagree(used) else SCALES[:1]
    unusual = dataclasses.replace(before, whole_step=before.unusual_step)
    odds = ((before, 1 - before.unusual_share), (unusual, before.unusual_share))
    fits = (
        (_most_probable(used, place, assumed, scale, math.log(share)), assumed)
        for assumed, share in odds
        for scale in scales
    )
    best, before = max(fits, key=lambda fit: fit[0].evidence)
    # From what is shared and what is a class's own, to what is shared and the whole of each class.
    whole = np.eye(len(names) + 1)
    whole[:, 0] = [name != RECOMPUTED for name in ("", *names)]
    logarithms, covariance = whole @ best.logarithms, whole @ best.covariance @ whole.T
    factors: dict[str, Factor] = {}
    for name, number in place.items():
        value, spread = math.exp(logarithms[number]), math.exp(TAIL * math.sqrt(covariance[number, number]))
        factors[name] = Factor(
            value=value,
            low=value / spread,
            high=value * spread,
            before=before.width(name) if name == RECOMPUTED else before.whole_width(name),
            num_runs=sum(_has(run, name) for run in used),
        )
    return Factors(
        runs=used,
        by_class=factors,
        shared=math.exp(logarithms[0]),
        covariance=tuple(tuple(map(float, row)) for row in covariance),
        before=before,
        set_aside=set_aside,
        scale=best.scale,
    )


def _has(run: MeasuredRun, name: str) -> bool:
    if name == RECOMPUTED:
        return bool(run.recomputed_seconds)
    return name in run.exposed_seconds or name in run.classes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """The most probable logarithms at one scale of the noise of step times: shared, then each class's own.

    `evidence`: the logarithm of the probability of the measurements, of this scale and of what is assumed,
    up to a constant.
    """

    scale: float
    logarithms: Vector
    covariance: Matrix
    evidence: float


def _most_probable(
    runs: tuple[MeasuredRun, ...], place: Mapping[str, int], assumed: Prior, scale: float, odds: float
) -> _Fit:
    """Return the most probable logarithms of the factors.

    Args:
        assumed: about the factors.
        scale: multiplies the noise of step times.
        odds: the logarithm of the probability of `assumed`.
    """
    before = np.array([assumed.shared_deviation, *(assumed.deviation(name) for name in place)])
    noise = assumed.between_programs
    x: Vector = np.zeros(len(before))
    noises = [(run, noise if run.classes else noise * scale) for run in runs]
    heavy = np.array([False] * len(before) + [is_heavy for run in runs for is_heavy in _tails(run)])
    heavy &= _can_disagree(runs)
    residuals, slopes = _misfit(x, noises, place, before, noise)
    for _ in range(MOST_ROUNDS):
        root = np.sqrt(_weights(residuals, heavy))
        solved = np.linalg.lstsq(slopes * root[:, None], -residuals * root, rcond=None)
        step: Vector = solved[0].astype(np.float64)
        share = 1.0
        again = _misfit(x + step, noises, place, before, noise)
        while _cost(again[0], heavy) > _cost(residuals, heavy) and share > SMALL_STEP:
            share /= 2
            again = _misfit(x + share * step, noises, place, before, noise)
        x, (residuals, slopes) = x + share * step, again
        if float(np.abs(share * step).max()) < SMALL_STEP:
            break
    curvature: Matrix = slopes.T @ (slopes * _weights(residuals, heavy)[:, None])
    num_scaled = sum(not run.classes for run in runs)
    evidence = -_cost(residuals, heavy) - np.linalg.slogdet(curvature)[1] / 2
    evidence -= (num_scaled + SCALE_POWER) * math.log(scale)
    evidence += odds - math.log(before[0])  # the classes' own widths are the same in all fits
    inverse: Matrix = np.linalg.inv(curvature).astype(np.float64)
    return _Fit(scale=scale, logarithms=x, covariance=inverse, evidence=float(evidence))


def _can_disagree(runs: tuple[MeasuredRun, ...]) -> bool:
    """Return whether several step times were measured: a single one has no outlier to detect."""
    return sum(not run.classes for run in runs) > 1


def _tails(run: MeasuredRun) -> tuple[bool, ...]:
    """Return which of a run's residuals have heavy tails: its step time, unless a trace timed its classes."""
    return (not run.classes, *(False for _ in run.classes))


def _cost(residuals: Vector, heavy: NDArray[np.bool_]) -> float:
    """Return minus the logarithm of the residuals' probability, up to a constant."""
    squares = residuals**2
    return float(np.where(heavy, (FREEDOM + 1) * np.log1p(squares / FREEDOM), squares).sum() / 2)


def _weights(residuals: Vector, heavy: NDArray[np.bool_]) -> Vector:
    """Return the weights of squares with which least squares has the slope of `_cost`."""
    return np.where(heavy, (FREEDOM + 1) / (FREEDOM + residuals**2), 1.0)


def _misfit(
    x: Vector,
    noises: Sequence[tuple[MeasuredRun, float]],
    place: Mapping[str, int],
    before: Vector,
    noise: float,
) -> tuple[Vector, Matrix]:
    """Return all residuals in deviations or scales of the noise, and their slopes by each entry of `x`.

    Args:
        noises: each run with that of its step time. `noise`: of classes that a trace timed.
    """
    again = math.exp(x[place[RECOMPUTED]]) if RECOMPUTED in place else 1.0
    residuals, slopes = [*(x / before)], [*np.diag(1 / before)]
    for run, of_step in noises:
        row = np.zeros(len(x))
        for name, seconds in run.exposed_seconds.items():
            factor, repeated = math.exp(x[0] + x[place[name]]), run.recomputed_seconds.get(name, 0.0)
            row[place[name]] = factor * (seconds + (again - 1) * repeated)
            row[0] += row[place[name]]
            if repeated:
                row[place[RECOMPUTED]] += factor * again * repeated
        residuals.append(math.log(row[0] / run.measured_seconds) / of_step)
        slopes.append(row / row[0] / of_step)
        for name, timed in run.classes.items():
            seen = np.zeros(len(x))
            seen[[0, place[name]]] = 1 / noise
            repeated = run.recomputed_seconds.get(name, 0.0) / timed.predicted_seconds
            factor = math.exp(x[0] + x[place[name]]) * (1 + (again - 1) * repeated)
            if repeated:
                seen[place[RECOMPUTED]] = again * repeated / (1 + (again - 1) * repeated) / noise
            ratio = timed.measured_seconds / timed.predicted_seconds
            residuals.append(math.log(factor / ratio) / noise)
            slopes.append(seen)
    return np.array(residuals), np.array(slopes)


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
