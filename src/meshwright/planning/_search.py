"""Decide which candidate to compile next, from the estimates and from what compiled candidates revealed.

An estimate is wrong by a factor that is much alike within a family: candidates with the same policy of
rematerialisation and the same kinds of axes. So the logarithm of (compiled / estimate) is taken as a sum of
effects, one for each property of a candidate (`_properties`), each with a prior of mean 0, and every compiled
candidate narrows them: Bayesian linear regression in closed form (Bishop, "Pattern Recognition and Machine
Learning", section 3.3). That gives each candidate an expected time and memory and how far they may be off.

The next to compile has the largest expected saving (Jones et al. 1998, "Efficient Global Optimization"): the
saving against the best that is known to fit, times the probability that it fits. The first few come from
families of their own, because a search finds where an estimate errs: the favourites of the closed form alone
did not fit once compiled. The search is done when the largest expected saving is below `LEAST_SAVING`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._estimates import Estimates
from ._space import CONTEXT, DATA, EXPERT, FSDP, SETTINGS, STAGE, TENSOR, Candidates

Numbers = NDArray[np.float64]

LEAST_SAVING = 0.002  # of the best step: a smaller expected saving is not worth a compilation
NUM_FAMILIES = 6  # compiled from different families before families may repeat
PROMISING = 1.35  # families whose best estimate is within this factor of the best of all
TIME_EFFECT, TIME_NOISE = 0.12, 0.04  # standard deviations of ln(compiled / estimate): one effect, the rest
MEMORY_EFFECT, MEMORY_NOISE = 0.20, 0.06
CLOSE_TO_SURE = 0.02  # probability of fitting below which a candidate is not compiled


_erf = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one candidate turned out to be: seconds of a step and bytes that one device reserves.

    Both are None if it could not be compiled.
    """

    seconds: float | None
    reserved_bytes: int | None


class _Effects:
    """The posterior of the effects on one figure, and the factor by which estimates are to be corrected."""

    def __init__(self, properties: Numbers, effect: float, noise: float) -> None:
        self._properties, self._noise = properties, noise
        count = properties.shape[1]
        self._mean: Numbers = np.zeros(count)
        self._covariance: Numbers = np.eye(count) * effect**2

    def learn(self, row: int, log_ratio: float) -> None:
        """Take one more observation of ln(compiled / estimate)."""
        x = self._properties[row]
        gain = self._gain(self._covariance, x)
        self._mean = self._mean + gain * (log_ratio - x @ self._mean)
        self._covariance = np.asarray(self._covariance - np.outer(gain, x @ self._covariance), np.float64)

    def _gain(self, covariance: Numbers, x: Numbers) -> Numbers:
        return np.asarray(covariance @ x / (x @ covariance @ x + self._noise**2), np.float64)

    def expected(self, pending: Iterable[int] = ()) -> tuple[Numbers, Numbers]:
        """Return mean and standard deviation of ln(compiled / estimate) of every candidate.

        Those that are `pending` are taken as known: what they will reveal need not be looked for again.
        """
        covariance = self._covariance
        for row in pending:
            x = self._properties[row]
            less = np.outer(self._gain(covariance, x), x @ covariance)
            covariance = np.asarray(covariance - less, np.float64)
        variance = ((self._properties @ covariance) * self._properties).sum(axis=1)
        return self._properties @ self._mean, np.sqrt(np.maximum(variance, 0) + self._noise**2)


class Search:
    """The order in which candidates are compiled.

    Args:
        room_bytes: for each candidate, what its program may reserve; infinite where nothing is known.
    """

    def __init__(self, candidates: Candidates, estimates: Estimates, room_bytes: Numbers) -> None:
        self.candidates, self.estimates = candidates, estimates
        self._room = room_bytes
        properties = _properties(candidates)
        self._time = _Effects(properties, TIME_EFFECT, TIME_NOISE)
        self._memory = _Effects(properties, MEMORY_EFFECT, MEMORY_NOISE)
        self._open = estimates.memory_bound <= room_bytes
        self._families = _families(candidates)
        self._tried_families: set[int] = set()
        self.num_too_large = int((~self._open).sum())
        self.outcomes: dict[int, Outcome] = {}
        self._pending: set[int] = set()
        self._preferred: list[int] = []

    @property
    def num_begun(self) -> int:
        """Number of candidates that `next` has returned."""
        return len(self._pending) + len(self.outcomes)

    @property
    def best(self) -> int | None:
        """The fastest compiled candidate that fits; None so far."""
        fitting = [
            (outcome.seconds, row)
            for row, outcome in self.outcomes.items()
            if outcome.seconds is not None
            and outcome.reserved_bytes is not None
            and outcome.reserved_bytes <= self._room[row]
        ]
        return min(fitting)[1] if fitting else None

    def most_promising(self, count: int) -> list[int]:
        """Return the candidates with the largest probability of fitting over expected seconds, best first."""
        seconds, _ = self.expected_seconds()
        promise = np.where(self._open, self.probability_of_fitting() / seconds, -1.0)
        best = np.argsort(-promise, kind="stable")[:count]
        return [int(row) for row in best if promise[row] > 0]

    def prefer(self, rows: Iterable[int]) -> None:
        """Let `next` return these first: what they turn out to be costs no compilation."""
        self._preferred = [row for row in rows if self._open[row]]

    def next(self) -> int | None:
        """Return the candidate to compile now, and hold it as begun; None if nothing promises a saving."""
        if self._preferred:
            return self._begin(self._preferred.pop(0))
        seconds, spread = self.expected_seconds()
        fits = self.probability_of_fitting()
        worth = self._open & (fits > CLOSE_TO_SURE)
        if not worth.any():
            return None
        gain = self._gain(seconds, spread, fits, worth)
        row = int(np.argmax(gain))
        best = self.best
        if best is not None and gain[row] < LEAST_SAVING * (self.outcomes[best].seconds or 0.0):
            return None
        return self._begin(row)

    def _begin(self, row: int) -> int:
        self._open[row] = False
        self._tried_families.add(int(self._families[row]))
        self._pending.add(row)
        return row

    def _gain(self, seconds: Numbers, spread: Numbers, fits: Numbers, worth: NDArray[np.bool_]) -> Numbers:
        """Return the expected saving of compiling each candidate; before any is known to fit, its promise."""
        best = self.best
        if best is None or self.outcomes[best].seconds is None:
            gain = fits / seconds
        else:
            gain = fits * expected_saving(self.outcomes[best].seconds or 0.0, seconds, spread)
        gain = np.where(worth, gain, -1.0)
        if len(self._tried_families) < NUM_FAMILIES:
            least = (seconds / np.maximum(fits, 1e-3))[worth].min()
            promising = worth & (seconds / np.maximum(fits, 1e-3) <= PROMISING * least)
            fresh = promising & ~np.isin(self._families, list(self._tried_families))
            if fresh.any():
                gain = np.where(fresh, fits / seconds * 1e9, gain)  # before all others
        return gain

    def finish(self, row: int, outcome: Outcome) -> None:
        """Take the outcome of a candidate, and correct the estimates of all that are like it."""
        self._pending.discard(row)
        self.outcomes[row] = outcome
        if outcome.seconds is not None:
            self._time.learn(row, math.log(outcome.seconds / self.estimates.seconds[row]))
        if outcome.reserved_bytes:
            self._memory.learn(row, math.log(outcome.reserved_bytes / self.estimates.memory[row]))

    def expected_seconds(self) -> tuple[Numbers, Numbers]:
        """Return the corrected seconds of every candidate, and their standard deviation as a share of them.

        They are not below the bound.
        """
        mean, spread = self._time.expected(self._pending)
        return np.maximum(self.estimates.seconds * np.exp(mean), self.estimates.seconds_bound), spread

    def expected_memory(self) -> tuple[Numbers, Numbers]:
        """Return the corrected bytes of every candidate, and their standard deviation as a share of them."""
        mean, spread = self._memory.expected(self._pending)
        return np.maximum(self.estimates.memory * np.exp(mean), self.estimates.memory_bound), spread

    def probability_of_fitting(self) -> Numbers:
        """Return for every candidate the probability that it reserves no more than its room."""
        expected, spread = self.expected_memory()
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.where(self._room > 0, np.log(np.maximum(self._room, 1) / expected) / spread, -np.inf)
        return normal_cdf(z)


def expected_saving(best: float, seconds: Numbers, spread: Numbers) -> Numbers:
    """Return the expected seconds by which candidates are faster than `best`, counting slower ones as 0.

    The time of a candidate is log-normal around `seconds` with the relative standard deviation `spread`; to
    first order that is a normal distribution of deviation `seconds` x `spread`.

    >>> float(expected_saving(10.0, np.array([8.0]), np.array([1e-6]))[0])
    2.0
    """
    deviation = seconds * spread
    z = (best - seconds) / deviation
    density = np.exp(-(np.clip(z, -40, 40) ** 2) / 2) / math.sqrt(2 * math.pi)
    return (best - seconds) * normal_cdf(z) + deviation * density


def normal_cdf(z: Numbers) -> Numbers:
    """Return the cumulative normal distribution.

    >>> [round(float(p), 4) for p in normal_cdf(np.array([-1.0, 0.0, 1.0]))]
    [0.1587, 0.5, 0.8413]
    """
    return 0.5 * (1 + np.asarray(_erf(z / math.sqrt(2)), np.float64))


def _properties(candidates: Candidates) -> Numbers:
    """Return what the effects belong to, [candidates, properties]: 1 for all, then kinds of candidates.

    An axis counts by whether it is there and by the logarithm of its size.
    """
    sizes = candidates.sizes.astype(float)
    columns = [np.ones(len(candidates))]
    for axis in (STAGE, DATA, FSDP, CONTEXT, EXPERT, TENSOR):
        columns += [(sizes[:, axis] > 1).astype(float), np.log2(sizes[:, axis]) / 4]
    for name, values in SETTINGS.items():
        columns += [(candidates.settings[name] == place).astype(float) for place in range(1, len(values))]
    columns += [np.log2(candidates.microbatch.astype(float)) / 4]
    columns += [(candidates.inner != TENSOR).astype(float)]
    return np.stack(columns, axis=1)


def _families(candidates: Candidates) -> NDArray[np.int64]:
    """Return a number for each candidate: the same for those with the same axes, policy and offload."""
    family = np.zeros(len(candidates), np.int64)
    for axis in (STAGE, CONTEXT, EXPERT, TENSOR):
        family = 2 * family + (candidates.sizes[:, axis] > 1)
    return (family * len(SETTINGS["remat"]) + candidates.settings["remat"]) * len(SETTINGS["offload"]) + (
        candidates.settings["offload"]
    )
