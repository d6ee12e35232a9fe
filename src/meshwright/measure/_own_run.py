"""Measure a run of ours: the seconds of its steps, its arrays on a device, its memory's growth."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from ._reconciliation import Percentiles

WARM_UP_STEPS = 2  # left out of the spread: the first steps fill allocators and caches


class StepClock:
    """A clock that is read when a step is done; `start` excludes the time since the previous step.

    Args:
        now: the clock in seconds; it never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self.seconds: list[float] = []

    def start(self) -> None:
        """Begin the next step now."""
        self._last = self._now()

    def leave_out(self, seconds: float) -> None:
        """Exclude some seconds from the current step."""
        self._last += seconds

    def tick(self) -> float:
        """End a step; return its seconds since `start` or the previous `tick`."""
        now = self._now()
        self.seconds.append(now - self._last)
        self._last = now
        return self.seconds[-1]

    def spread(self) -> Percentiles | None:
        """Summarise all steps but the first two; None if there are no others."""
        timed = self.seconds[WARM_UP_STEPS:]
        return Percentiles.of(timed) if timed else None


_STATUS = Path("/proc/self/status")


def bytes_on(device: Any, arrays: Iterable[Any]) -> int:
    """Sum the bytes that live `jax.Array`s hold on one device, by the runtime: their shards there."""
    return sum(
        shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device
    )


class ResidentGrowth:
    """The growth of this process's resident memory from the start of the measurement to the peak since then.

    At the start, glibc's `malloc_trim` returns memory that the process has freed but kept, and the kernel's
    record of the peak is reset. Both need Linux, and are exact to about a megabyte. On other systems `bytes`
    returns None, and `why_not` holds the reason.

    Args:
        clear_peak: the file that resets the peak once 5 is written to it (man 5 proc).
    """

    def __init__(self, clear_peak: Path = Path("/proc/self/clear_refs")) -> None:
        self.why_not = ""
        self._before = 0
        if not clear_peak.exists():
            self.why_not = f"{sys.platform} cannot reset a process's peak of resident memory"
            return
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        try:
            clear_peak.write_text("5")
        except OSError as refused:
            self.why_not = f"this system does not let a process reset its peak: {refused.strerror}"
            return
        self._before = psutil.Process().memory_info().rss

    def bytes(self) -> int | None:
        """Return the bytes from the start to the peak since; None if `why_not` holds a reason."""
        if self.why_not:
            return None
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return max(int(line.split()[1]) * 1024 - self._before, 0)
