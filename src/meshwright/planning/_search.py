"""Decide which candidate to compile next, from the estimates and from what compiled candidates revealed.

An estimate is wrong by a factor that is much alike within a family: candidates with the same policy of
rematerialisation and the same kinds of axes. So the logarithm of (compiled / estimate) is taken as a sum of
effects, one for each property of a candidate, each with a prior of mean 0, and every compiled
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
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ._estimates import Estimates

Numbers = NDArray[np.float64]

LEAST_SAVING = 0.002  # of the best step: a smaller expected saving is not worth a compilation
NUM_FAMILIES = 6  # compiled from different families before families may repeat
PROMISING = 1.35  # families whose best estimate is within this factor of the best of all
CLOSE_TO_SURE = 0.02  # probability of fitting below which a candidate is not compiled


_erf = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """Standard deviations of ln(compiled / estimate): of one effect, and of the residual."""

    time_effect: float = 0.12
    time_noise: float = 0.04
    memory_effect: float = 0.20
    memory_noise: float = 0.06


class Searchable(Protocol):
    """Candidates of any kind, as the search sees them."""

    def __len__(self) -> int:
        """Return the number of candidates."""
        ...

    def properties(self) -> Numbers:
        """Return the features of the effects, [candidates, properties]; the first column is constant."""
        ...

    def families(self) -> NDArray[np.int64]:
        """Return a number for each candidate, the same within a family."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Hold the figures of one compiled candidate: seconds of a step and bytes that one device reserves.

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
        priors: how far the estimates may be off.
    """

    def __init__(
        self,
        candidates: Searchable,
        estimates: Estimates,
        room_bytes: Numbers,
        priors: Priors = Priors(),
    ) -> None:
        self.estimates = estimates
        self._room = room_bytes
        properties = candidates.properties()
        self._time = _Effects(properties, priors.time_effect, priors.time_noise)
        self._memory = _Effects(properties, priors.memory_effect, priors.memory_noise)
        self._open = estimates.memory_bound <= room_bytes
        self._families = candidates.families()
        self._tried_families: set[int] = set()
        self._chosen_families: set[int] = set()  # without those of `prefer` that are not to count
        self._uncounted: frozenset[int] = frozenset()
        self.num_too_large = int((~self._open).sum())
        self.outcomes: dict[int, SearchOutcome] = {}
        self._pending: set[int] = set()
        self._preferred: list[int] = []

    @property
    def num_begun(self) -> int:
        """Number of candidates that `next` has returned."""
        return len(self._pending) + len(self.outcomes)

    @property
    def has_preferred(self) -> bool:
        """Return whether `next` returns a candidate that was preferred."""
        return bool(self._preferred)

    @property
    def best(self) -> int | None:
        """The fastest compiled candidate that fits, of equal ones the first to finish; None so far."""
        fitting = [
            (outcome.seconds, row)
            for row, outcome in self.outcomes.items()
            if outcome.seconds is not None
            and outcome.reserved_bytes is not None
            and outcome.reserved_bytes <= self._room[row]
        ]
        return min(fitting, key=lambda each: each[0])[1] if fitting else None

    def promise(self) -> Numbers:
        """Return of each candidate the probability of fitting over expected seconds; -1 of those not open."""
        seconds, _ = self.expected_seconds()
        return np.where(self._open, promise_of(seconds, self.probability_of_fitting()), -1.0)

    def most_promising(self, count: int) -> list[int]:
        """Return the candidates with the largest promise, best first."""
        promise = self.promise()
        best = np.argsort(-promise, kind="stable")[:count]
        return [int(row) for row in best if promise[row] > 0]

    def prefer(self, rows: Iterable[int], uncounted: Iterable[int] = ()) -> None:
        """Let `next` return these first. Families of `uncounted` are not among those that a search tries."""
        self._preferred = [row for row in rows if self._open[row]]
        self._uncounted = frozenset(uncounted)

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
        if row not in self._uncounted:
            self._chosen_families.add(int(self._families[row]))
        self._pending.add(row)
        return row

    def _gain(self, seconds: Numbers, spread: Numbers, fits: Numbers, worth: NDArray[np.bool_]) -> Numbers:
        """Return the expected saving of compiling each candidate; before any is known to fit, its promise."""
        best = self.best
        if best is None or self.outcomes[best].seconds is None:
            gain = promise_of(seconds, fits)
        else:
            gain = fits * expected_saving(self.outcomes[best].seconds or 0.0, seconds, spread)
        gain = np.where(worth, gain, -1.0)
        if len(self._chosen_families) < NUM_FAMILIES:
            least = (seconds / np.maximum(fits, 1e-3))[worth].min()
            promising = worth & (seconds / np.maximum(fits, 1e-3) <= PROMISING * least)
            fresh = promising & ~np.isin(self._families, list(self._tried_families))
            if fresh.any():
                gain = np.where(fresh, promise_of(seconds, fits) * 1e9, gain)  # before all others
        return gain

    def finish(self, row: int, outcome: SearchOutcome) -> None:
        """Take the outcome of a candidate, and correct the estimates of all that are like it."""
        self._pending.discard(row)
        self.outcomes[row] = outcome
        if outcome.seconds is not None:
            fits = (outcome.reserved_bytes or 0) <= self._room[row]
            estimated = self.estimates.seconds_fitting if fits else self.estimates.seconds
            self._time.learn(row, math.log(outcome.seconds / estimated[row]))
        if outcome.reserved_bytes:
            self._memory.learn(row, math.log(outcome.reserved_bytes / self.estimates.memory[row]))

    def expected_seconds(self) -> tuple[Numbers, Numbers]:
        """Return the corrected seconds of every candidate, and their standard deviation as a share of them.

        They are not below the bound, and those of a program that fits: of others nothing is gained. How
        likely it fits counts once, as a probability, and does not raise the price besides.
        """
        mean, spread = self._time.expected(self._pending)
        seconds = self.estimates.seconds_fitting * np.exp(mean)
        return np.maximum(seconds, self.estimates.seconds_bound), spread

    def expected_memory(self) -> tuple[Numbers, Numbers]:
        """Return the corrected bytes of every candidate, and their standard deviation as a share of them."""
        mean, spread = self._memory.expected(self._pending)
        return np.maximum(self.estimates.memory * np.exp(mean), self.estimates.memory_bound), spread

    def probability_of_fitting(self) -> Numbers:
        """Return for every candidate the probability that it reserves no more than its room."""
        return fitting_probability(*self.expected_memory(), self._room)


def promise_of(seconds: Numbers, fits: Numbers) -> Numbers:
    """Return how promising candidates are, by expected seconds and by the probability that they fit.

    The largest is the least expected time, where one that does not fit costs its time again.

    >>> promise_of(np.array([10.0, 8.0]), np.array([1.0, 0.5])).tolist()
    [0.1, 0.0625]
    """
    return fits / seconds


def fitting_probability(expected: Numbers, spread: Numbers, room: Numbers) -> Numbers:
    """Return the probability that candidates need no more bytes than `room`.

    Their bytes are log-normal around `expected`, with the standard deviation `spread` of their logarithm.

    >>> fitting_probability(np.array([8.0, 8.0]), np.array([0.1, 0.1]), np.array([8.0, 80.0])).tolist()
    [0.5, 1.0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(room > 0, np.log(np.maximum(room, 1) / expected) / spread, -np.inf)
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
