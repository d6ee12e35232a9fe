"""Bytes that a run takes: live arrays by the runtime, and what the process grows by."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

_CLEAR_PEAK = Path("/proc/self/clear_refs")  # writing 5 resets the peak (man 5 proc)
_STATUS = Path("/proc/self/status")


def bytes_on(device: Any, arrays: Iterable[Any]) -> int:
    """Bytes that live `jax.Array`s hold on one device, by the runtime: the shards that lie there."""
    return sum(
        shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device
    )


class ResidentGrowth:
    """How far the peak of this process's resident memory lies above what it held at the start.

    At the start memory that the process has freed but kept is handed back (glibc's `malloc_trim`) and
    the kernel's mark of the peak is reset; both are Linux's, exact to about a megabyte. Elsewhere `bytes`
    is None, and `why_not` says so.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._before = 0
        if not _CLEAR_PEAK.exists():
            self.why_not = f"{sys.platform} cannot reset a process's peak of resident memory"
            return
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        try:
            _CLEAR_PEAK.write_text("5")
        except OSError as refused:
            self.why_not = f"this system does not let a process reset its peak: {refused.strerror}"
            return
        self._before = psutil.Process().memory_info().rss

    def bytes(self) -> int | None:
        """Bytes from the start to the peak since; None where `why_not` says why."""
        return None if self.why_not else max(_peak_bytes() - self._before, 0)


def _peak_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
