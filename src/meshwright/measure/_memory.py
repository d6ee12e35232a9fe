"""Measure the memory of devices, of live arrays, and of this process.

`memory` shows what each device has allocated now, its peak, and the growth over a block of code. `bytes_on`
and `ResidentGrowth` measure a training run: the bytes of its arrays and the growth of its process.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ..errors import InputError
from ..units import aligned, format_bytes
from ._storages import buffers_of

LIVE_ARRAYS = "live jax arrays: this device's runtime keeps no statistics"
NO_PEAK = "this device's runtime keeps no peak"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one device.

    `peak_bytes`: the peak since the process began; None for the reason in `why_no_peak`.
    """

    device: str
    allocated_bytes: int
    peak_bytes: int | None
    limit_bytes: int | None
    source: str
    why_no_peak: str


class Memory:
    """The memory of each device at one moment, and before and after a block if used in a `with`.

    `devices`: at construction. After a block, `before`, `after` and `grown_bytes` exist too.
    """

    def __init__(self) -> None:
        self.devices = _devices()
        self._before: tuple[DeviceMemory, ...] | None = None
        self._after: tuple[DeviceMemory, ...] | None = None

    def __enter__(self) -> Memory:
        self._before, self._after = _devices(), None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._after = _devices()

    @property
    def before(self) -> tuple[DeviceMemory, ...]:
        """Each device when the block began.

        Raises:
            InputError: no block was entered.
        """
        return self._of_the_block(self._before)

    @property
    def after(self) -> tuple[DeviceMemory, ...]:
        """Each device when the block had ended.

        Raises:
            InputError: no block has ended.
        """
        return self._of_the_block(self._after)

    @property
    def grown_bytes(self) -> dict[str, int]:
        """Bytes allocated after the block minus bytes before it, by device; may be negative.

        Raises:
            InputError: no block has ended.
        """
        before = {found.device: found.allocated_bytes for found in self.before}
        return {found.device: found.allocated_bytes - before.get(found.device, 0) for found in self.after}

    def _of_the_block(self, found: tuple[DeviceMemory, ...] | None) -> tuple[DeviceMemory, ...]:
        if found is None:
            raise InputError(
                "no block of code has ended under this measurement",
                hint="use it as `with mw.memory() as used: ...`, and ask after the block",
            )
        return found

    def __str__(self) -> str:
        grown = {} if self._after is None else self.grown_bytes
        rows = [
            (
                found.device,
                format_bytes(found.allocated_bytes),
                *([format_bytes(grown[found.device])] if grown else []),
                "not kept" if found.peak_bytes is None else format_bytes(found.peak_bytes),
                "not told" if found.limit_bytes is None else format_bytes(found.limit_bytes),
                found.source,
            )
            for found in (self._after or self.devices)
        ]
        header = ("device", "allocated", *(["grown"] if grown else []), "peak", "limit", "by")
        return aligned(header, rows, right={"allocated", "grown", "peak", "limit"})


def memory() -> Memory:
    """Return the memory of all devices of this process: jax's, and torch's CUDA devices if torch uses CUDA.

    The numbers are those of the runtime's allocator if it keeps statistics, or else (on a CPU) the bytes of
    live jax arrays.
    Not counted: numpy's and torch's arrays on the host (`footprint` counts those of a tree).
    """
    return Memory()


def _devices() -> tuple[DeviceMemory, ...]:
    import jax

    devices = jax.local_devices()
    kept = {device: device.memory_stats() for device in devices}
    live = _live_bytes() if any(not stats for stats in kept.values()) else Counter()
    found = [_of_jax(device, stats, live) for device, stats in kept.items()]
    return (*found, *_of_torch())


def _of_jax(device: Any, stats: dict[str, int] | None, live: Counter[Any]) -> DeviceMemory:
    name = f"{device.platform}:{device.id}"
    if not stats:
        return DeviceMemory(
            device=name,
            allocated_bytes=live[device],
            peak_bytes=None,
            limit_bytes=None,
            source=LIVE_ARRAYS,
            why_no_peak=NO_PEAK,
        )
    peak = stats.get("peak_bytes_in_use")
    return DeviceMemory(
        device=name,
        allocated_bytes=stats["bytes_in_use"],
        peak_bytes=peak,
        limit_bytes=stats.get("bytes_limit"),
        source="the runtime's allocator",
        why_no_peak="" if peak is not None else NO_PEAK,
    )


def _live_bytes() -> Counter[Any]:
    """Sum the bytes of live jax arrays by device, counting each buffer once."""
    import jax

    seen: dict[tuple[Any, int], int] = {}
    for array in jax.live_arrays():
        for device, address, num_bytes in buffers_of(array):
            seen[device, address] = num_bytes
    totals: Counter[Any] = Counter()
    for (device, _), num_bytes in seen.items():
        totals[device] += num_bytes
    return totals


def _of_torch() -> list[DeviceMemory]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [
        DeviceMemory(
            device=f"torch cuda:{number}",
            allocated_bytes=torch.cuda.memory_allocated(number),
            peak_bytes=torch.cuda.max_memory_allocated(number),
            limit_bytes=torch.cuda.get_device_properties(number).total_memory,
            source="torch's caching allocator",
            why_no_peak="",
        )
        for number in range(torch.cuda.device_count())
    ]


_CLEAR_PEAK = Path("/proc/self/clear_refs")  # writing 5 resets the peak (man 5 proc)
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
        """Return the bytes from the start to the peak since; None if `why_not` holds a reason."""
        return None if self.why_not else max(_peak_bytes() - self._before, 0)


def _peak_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
