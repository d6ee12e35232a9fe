"""What a run spends its time on, by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["start-up", "compile", "restore", "step", "input wait", "evaluation", "checkpoint", "end"]


class Phases:
    """Seconds by phase, which add up to all that has passed; a phase within another interrupts it.

    Args:
        now: the clock in seconds; it never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = self.began = now()
        self._seconds: dict[str, float] = {}
        self.current: Phase = "start-up"

    def enter(self, phase: Phase) -> None:
        """From now on it is this phase."""
        now = self._now()
        self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._since
        self.current, self._since = phase, now

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """This phase within the block, and the one before it after it."""
        before = self.current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """By phase, until now."""
        self.enter(self.current)
        return dict(self._seconds)
