"""Fit factors on predicted seconds, by class of work, to the steps that a user measured.

All measured runs are fitted at once: the result is the most probable set of factors, given what is assumed
before (runs.toml, [factors]) and the measurements. Write x for the logarithms of the factors. Before, each
is normal around 0 with a width of its own. A measured step of m seconds says that
sum over classes of exp(x) e = m, with e the predicted exposed seconds; a class that a trace timed says that
exp(x) is measured / predicted. Both hold up to normal noise of the logarithm. The maximum is found by
Gauss-Newton steps; the inverse of its curvature is taken as the covariance (Laplace's approximation). So one
step time moves each class by its share of the step and its width, and several steps of different mixes tell
classes apart.
Left out: hiding of messages changes with the factors, so a walk with them may differ from the sum above.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, nearest_name
from meshwright.hardware import COLLECTIVE_KINDS, Calibration, Chip, MeasuredRun, MeasuredRuns

TAIL = 1.6449  # standard deviations of a normal variable that leave 5 % on one side
MOST_ROUNDS = 50
SMALL_STEP = 1e-9  # of a logarithm
RESOLVED = 0.5  # of the width before, below which measurements tell a class's rate

Vector = NDArray[np.float64]


def class_of(slice_name: str) -> str:
    """Return the class of work of a slice of a prediction: collectives by kind, without their axes.

    >>> class_of("all-gather[fsdp]"), class_of("matmul")
    ('all-gather', 'matmul')
    """
    return slice_name.partition("[")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Measured / predicted seconds of a class: the most probable value, and its 90 % range.

    `before`: the factor's width before anything was measured. `num_runs`: measured runs that have the class.
    """

    value: float
    low: float
    high: float
    before: float
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What is assumed of factors before anything is measured.

    `widths`: by class; a factor lies nine times of ten between 1 / width and width.
    `between_programs`: the standard deviation of the logarithm of a step that no factor explains.
    """

    widths: Mapping[str, float]
    between_programs: float

    def width(self, name: str) -> float:
        """Return the width of a class.

        Raises:
            InputError: no class has this name.
        """
        kind = "collective" if name in (*COLLECTIVE_KINDS, "collective-permute") else name
        if kind not in self.widths:
            raise InputError(f"no class of work is called {name!r}", hint=nearest_name(name, self.widths))
        return self.widths[kind]

    def deviation(self, name: str) -> float:
        """Return the standard deviation of the logarithm of a class's factor."""
        return math.log(self.width(name)) / TAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of one chip by class, and the measured runs to which they were fitted.

    `before`: what is assumed without them. `set_aside`: the number of runs that were predicted with other
    rates and are not used.
    """

    runs: tuple[MeasuredRun, ...] = ()
    by_class: Mapping[str, Factor] = field(default_factory=dict[str, Factor])
    covariance: tuple[tuple[float, ...], ...] = ()  # of the logarithms, in the order of `by_class`
    before: Before | None = None  # None without any run
    set_aside: int = 0

    def of(self, slice_name: str) -> float:
        """Return the factor of a class; 1 where nothing was measured."""
        known = self.by_class.get(class_of(slice_name))
        return 1.0 if known is None else known.value

    def least(self) -> float:
        """Return the smallest factor that any product may have, at most 1."""
        return min(1.0, *(self.of(name) for name in ("matmul", "attention", "convolution")))

    def resolves(self, name: str) -> bool:
        """Return whether measurements more than halved what is uncertain about a class."""
        known = self.by_class.get(name)
        return known is not None and math.log(known.high / known.value) < RESOLVED * math.log(known.before)

    def deviation(self, exposed_seconds: Mapping[str, float]) -> float:
        """Return the standard deviation of the logarithm of a step, with what remains between programs.

        Args:
            exposed_seconds: of the step's slices, with these factors.
        """
        total = sum(exposed_seconds.values())
        shares: defaultdict[str, float] = defaultdict(float)
        for name, seconds in exposed_seconds.items():
            shares[class_of(name)] += seconds / total
        known = np.array([shares.pop(name, 0.0) for name in self.by_class])
        variance = float(known @ np.array(self.covariance) @ known) if len(known) else 0.0
        before = self.before
        assert before is not None, "no factors were fitted"
        variance += sum((share * before.deviation(name)) ** 2 for name, share in shares.items())
        return math.sqrt(variance + before.between_programs**2)

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


def fit_factors(runs: MeasuredRuns | None, rates: str, before: Before) -> Factors:
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
    place = {name: number for number, name in enumerate(names)}
    deviations = np.array([before.deviation(name) for name in names])
    logarithms, covariance = _most_probable(used, place, deviations, before.between_programs)
    factors: dict[str, Factor] = {}
    for name, number in place.items():
        value, spread = math.exp(logarithms[number]), math.exp(TAIL * math.sqrt(covariance[number, number]))
        factors[name] = Factor(
            value=value,
            low=value / spread,
            high=value * spread,
            before=before.width(name),
            num_runs=sum(name in run.exposed_seconds or name in run.classes for run in used),
        )
    return Factors(
        runs=used,
        by_class=factors,
        covariance=tuple(tuple(map(float, row)) for row in covariance),
        before=before,
        set_aside=set_aside,
    )


def _most_probable(
    runs: tuple[MeasuredRun, ...], place: Mapping[str, int], before: Vector, noise: float
) -> tuple[Vector, NDArray[np.float64]]:
    """Return the most probable logarithms of the factors, and their covariance."""
    x: Vector = np.zeros(len(before))
    residuals, slopes = _misfit(x, runs, place, before, noise)
    for _ in range(MOST_ROUNDS):
        step: Vector = np.linalg.lstsq(slopes, -residuals, rcond=None)[0].astype(np.float64)
        share = 1.0
        again = _misfit(x + step, runs, place, before, noise)
        while again[0] @ again[0] > residuals @ residuals and share > SMALL_STEP:
            share /= 2
            again = _misfit(x + share * step, runs, place, before, noise)
        x, (residuals, slopes) = x + share * step, again
        if float(np.abs(share * step).max()) < SMALL_STEP:
            break
    covariance: NDArray[np.float64] = np.linalg.inv(slopes.T @ slopes).astype(np.float64)
    return x, covariance


def _misfit(
    x: Vector, runs: tuple[MeasuredRun, ...], place: Mapping[str, int], before: Vector, noise: float
) -> tuple[Vector, NDArray[np.float64]]:
    """Return all residuals in standard deviations, and their slopes by logarithm of a factor."""
    residuals, slopes = [*(x / before)], [*np.diag(1 / before)]
    for run in runs:
        row = np.zeros(len(x))
        for name, seconds in run.exposed_seconds.items():
            row[place[name]] = seconds * math.exp(x[place[name]])
        residuals.append(math.log(row.sum() / run.measured_seconds) / noise)
        slopes.append(row / row.sum() / noise)
        for name, timed in run.classes.items():
            seen = np.zeros(len(x))
            seen[place[name]] = 1 / noise
            ratio = timed.measured_seconds / timed.predicted_seconds
            residuals.append((x[place[name]] - math.log(ratio)) / noise)
            slopes.append(seen)
    return np.array(residuals), np.array(slopes)


def before_measuring(table: Mapping[str, Any], *, products: float | None, is_cpu: bool) -> Before:
    """Return what is assumed of factors before anything is measured.

    Args:
        table: [factors] of runs.toml.
        products: the width of the chip's interval; None where no source bounds the error.
    """
    widths: dict[str, float] = dict(table["widths"])
    without_source, on_cpu = widths.pop("products_without_source"), widths.pop("on_cpu")
    if is_cpu:
        widths = {name: max(width, on_cpu) for name, width in widths.items()}
    widths["matmul"] = without_source if products is None else products
    return Before(widths=widths, between_programs=table["between_programs"])


def digest_of(chip: Chip, calibration: Calibration | None, *tables: Mapping[str, Any]) -> str:
    """Return a digest of all rates that price a step: the chip's, the measured ones, and the tables."""
    rates = None if calibration is None else dataclasses.asdict(calibration)
    links = [
        None if link is None else link.bytes_per_second for link in (chip.inside, chip.between, chip.host)
    ]
    figures = [dict(chip.peak_flops_per_second), chip.memory_bytes_per_second, links, rates, *tables]
    return hashlib.sha256(json.dumps(figures, sort_keys=True, default=str).encode()).hexdigest()[:16]
