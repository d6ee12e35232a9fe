"""Seconds of each step, and what they come to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from ..spread import Spread

WARM_UP_STEPS = 2
"""Left out of the spread: the first steps fill allocators and caches."""


class StepClock:
    """A clock that is read when a step is done; `start` again leaves out what lay between two steps.

    Args:
        now: the clock in seconds; it never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self.seconds: list[float] = []

    def start(self) -> None:
        """The next step begins now."""
        self._last = self._now()

    def leave_out(self, seconds: float) -> None:
        """Of the step that runs, these are not its own."""
        self._last += seconds

    def tick(self) -> float:
        """A step is done: its seconds, since `start` or the `tick` before."""
        now = self._now()
        self.seconds.append(now - self._last)
        self._last = now
        return self.seconds[-1]

    def usual_seconds(self) -> float:
        """The median so far; the first steps count while there are no others."""
        return statistics.median(self.seconds[WARM_UP_STEPS:] or self.seconds)

    def spread(self) -> Spread | None:
        """Of all steps but the first two; None where there were no more."""
        timed = self.seconds[WARM_UP_STEPS:]
        if not timed:
            return None
        low, high = np.quantile(timed, [0.05, 0.95])
        return Spread(median=statistics.median(timed), low=float(low), high=float(high), num_steps=len(timed))
