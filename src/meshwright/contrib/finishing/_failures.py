"""Hold what is known of failures before a run, and update it with one's own history.

The published figures, each with its source, are in failures.toml. A group of them is taken as runs of one
population: the logarithms' mean, and their deviation widened for the number of figures. Rates of faults are a
gamma distribution, which a count of one's own faults updates (conjugate). Such a count comes in bursts, so it
weighs as much as a Poisson count of a third of it.
Counted: faults that take a host from a run, bursts, incidents that need a person, times until steps are made
again. Not counted: lemons among hosts, seasons, the age of a cluster.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

LEAST_LOG_SD = 0.5
"""Least deviation between runs, an assumption: two or three published figures cannot show a smaller one."""
MOST_REWORK = 30.0  # times the time between faults: beyond it no checkpoint is ever reached
HISTORY = re.compile(r"\s*(\d{1,9})\s+in\s+(\d{1,12}(?:\.\d+)?)\s*(?:node-days?|days?)?\s*", re.ASCII)


@cache
def failures() -> Mapping[str, Any]:
    """Return failures.toml: published rates of faults, and times and costs of recovery."""
    return tomllib.loads(Path(__file__).with_name("failures.toml").read_text("utf-8"))


def published(group: str, without: Collection[str] = ()) -> list[float]:
    """Return the published figures of a group, but for sources that are left out."""
    values = [float(row["value"]) for row in failures()[group] if row["id"] not in without]
    assert values, f"every source of {group} is left out"
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A quantity whose logarithm is normal; `log_sd` 0 if the quantity is known."""

    median: float
    log_sd: float

    @classmethod
    def of(cls, group: str, without: Collection[str] = ()) -> LogNormal:
        """Return what a run like the published ones has: they vary, and their mean is not known exactly."""
        logs = [math.log(value) for value in published(group, without)]
        spread = max(LEAST_LOG_SD, statistics.stdev(logs) if len(logs) > 2 else 0.0)
        return cls(median=math.exp(statistics.fmean(logs)), log_sd=spread * math.sqrt(1 + 1 / len(logs)))

    @classmethod
    def known(cls, value: float) -> LogNormal:
        """Return a quantity that is known."""
        return cls(median=value, log_sd=0.0)

    def draw(self, chance: random.Random) -> float:
        """Return a value by chance."""
        return self.median * math.exp(self.log_sd * chance.gauss(0.0, 1.0))

    def updated(self, waits: Sequence[float]) -> LogNormal:
        """Return what is known of a mean after one's own waits, which are exponential around it.

        An inverse gamma distribution with the same moments of its logarithm is updated (conjugate).

        >>> prior = LogNormal(median=1000, log_sd=0.6)
        >>> round(prior.updated([60] * 50).median)  # one's own restarts outweigh the published ones
        109
        """
        if not waits or not self.log_sd:
            return self
        shape, seconds = self._inverse_gamma()
        shape, seconds = shape + len(waits), seconds + sum(waits)
        return LogNormal(median=seconds * math.exp(-_digamma(shape)), log_sd=math.sqrt(_trigamma(shape)))

    def log_likelihood(self, waits: Sequence[float]) -> float:
        """Return the logarithm of the density of one's own waits, but for a constant."""
        if not self.log_sd:
            return -len(waits) * math.log(self.median) - sum(waits) / self.median
        shape, seconds = self._inverse_gamma()
        after = shape + len(waits)
        found = shape * math.log(seconds) - math.lgamma(shape)
        return found + math.lgamma(after) - after * math.log(seconds + sum(waits))

    def _inverse_gamma(self) -> tuple[float, float]:
        """Return shape and scale of the inverse gamma distribution with these moments of its logarithm."""
        shape = _shape_of(self.log_sd**2)
        return shape, self.median * math.exp(_digamma(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRate:
    """Describe the faults of 1,000 hosts in a day by a gamma distribution.

    `shape`: a number of independent faults that were seen; `per_thousand`: thousands of node-days in which
    they were seen.

    >>> prior = FaultRate.of_published()
    >>> round(prior.updated(1000, 200_000).mean, 1)  # one's own history outweighs the published rates
    5.0
    """

    shape: float
    per_thousand: float

    @classmethod
    def of_published(cls, without: Collection[str] = ()) -> FaultRate:
        """Return what a cluster like the published ones has: the moments of their rates' logarithms."""
        of_logs = LogNormal.of("rate", without)
        shape = _shape_of(of_logs.log_sd**2)
        return cls(shape=shape, per_thousand=math.exp(_digamma(shape)) / of_logs.median)

    @property
    def mean(self) -> float:
        """Expected faults of 1,000 hosts in a day."""
        return self.shape / self.per_thousand

    def updated(self, faults: float, node_days: float) -> FaultRate:
        """Return what is known after so many faults in so many node-days."""
        bursts = failures()["bursts"]["variance_to_mean"]
        shape, per_thousand = faults / bursts, node_days / 1000 / bursts
        return FaultRate(shape=self.shape + shape, per_thousand=self.per_thousand + per_thousand)

    def draw(self, chance: random.Random) -> float:
        """Return a rate of one host in a day by chance."""
        return chance.gammavariate(self.shape, 1 / self.per_thousand) / 1000


def _digamma(shape: float) -> float:
    """Return the mean of the logarithm of a gamma variable of scale 1 (the asymptotic series from 6 on)."""
    below = 0.0
    while shape < 6:
        below, shape = below - 1 / shape, shape + 1
    return below + math.log(shape) - 1 / (2 * shape) - 1 / (12 * shape**2) + 1 / (120 * shape**4)


def _trigamma(shape: float) -> float:
    """Return the variance of the logarithm of a gamma variable."""
    below = 0.0
    while shape < 6:
        below, shape = below + 1 / shape**2, shape + 1
    return below + 1 / shape + 1 / (2 * shape**2) + 1 / (6 * shape**3) - 1 / (30 * shape**5)


def _shape_of(log_variance: float) -> float:
    """Return the shape of the gamma variable whose logarithm has a variance, by halving."""
    low, high = 1e-3, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _trigamma(middle) > log_variance else (low, middle)
    return low


def host_weight(chips_per_host: int) -> float:
    """Return how many times the faults of a host of 8 accelerators a host has."""
    host = failures()["host"]
    share = host["accelerator_share"]
    return 1 - share + share * chips_per_host / host["accelerators"]


def faults_by_chance(expected: float, chance: random.Random) -> float:
    """Return a number of faults by chance: gamma-Poisson, with the bursts of a published trace."""
    excess = failures()["bursts"]["variance_to_mean"] - 1
    return poisson(chance.gammavariate(expected / excess, excess), chance) if expected > 0 else 0


def work_again(span: float) -> float:
    """Return how many times the time of its work a run is up, which loses the work since its last checkpoint.

    Args:
        span: the time from one checkpoint to the next, divided by that between two faults.

    Gaps between faults are hyperexponential, two exponential parts with half of the time each, and have the
    published coefficient of variation. Each part is Daly's formula (2006, eq. 20 without restarts).

    >>> round(work_again(0.1), 2)  # half a period is lost at each fault
    1.05
    """
    excess = failures()["bursts"]["variance_to_mean"]
    lean = math.sqrt((excess - 1) / (excess + 1))
    parts = [min(span * (1 + side), MOST_REWORK) for side in (lean, -lean)]
    return 1 / statistics.fmean(part / math.expm1(part) if part > 1e-9 else 1.0 for part in parts)


def poisson(mean: float, chance: random.Random) -> int:
    """Return a Poisson number by chance; a rounded normal one where the mean is large."""
    if mean > 50:
        return max(0, round(chance.gauss(mean, math.sqrt(mean))))
    count, left = 0, chance.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + chance.expovariate(1.0)
    return count


def parsed_history(text: str) -> tuple[int, float]:
    """Parse one's own history of faults: "12 in 400 node-days".

    Raises:
        InputError: the text is none.

    >>> parsed_history("12 in 400 node-days")
    (12, 400.0)
    """
    match = HISTORY.fullmatch(text)
    if match is None or not float(match[2]):
        hint = 'write "12 in 400 node-days": faults that stopped runs, and hosts times days in which they did'
        raise InputError(f"cannot read {text[:60]!r} as a history of failures", hint=hint)
    return int(match[1]), float(match[2])
