"""Fit factors on predicted seconds to the steps that a user measured.

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
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware import MeasuredRun, MeasuredRuns
from meshwright.predict import RECOMPUTED, TAIL, Factor, Factors, Prior

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
FREEDOM = 2  # degrees of freedom of the noise of step times (runs.toml, [factors])
MOST_ROUNDS = 50
SMALL_STEP = 1e-9  # of a logarithm

SCALES = tuple(2 ** (power / 2) for power in range(10 + 1))
"""Multiples of the noise of step times that are tried: 1 to 32."""
SCALE_POWER = 1
"""A scale s of the noise is taken to be as probable as s to the minus this power before: an assumption."""


def fit_factors(runs: MeasuredRuns, rates: str, before: Prior) -> Factors:
    """Return the factors of all runs that were predicted with the present rates.

    Args:
        rates: the digest of the present rates, from `digest_of`.
        before: what is assumed of the factors, from `before_measuring`.

    Raises:
        InputError: a run has a class of work that is none.
    """
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
