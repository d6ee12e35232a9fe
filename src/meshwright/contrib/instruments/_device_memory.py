"""Measure memory: of each device, of live jax arrays with their owners.

`memory` shows the bytes that each device has allocated now, its peak, and the growth over a block of code.
`live` lists the arrays that are alive, with their shardings and owners.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import CellType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from meshwright.errors import InputError
from meshwright.reportable import OneLine
from meshwright.units import aligned, format_bytes

from ._array_storages import buffers_of, format_name

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


class Memory(OneLine):
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
        """Each device at the start of the block; `InputError` if no block was entered."""
        return _of_the_block(self._before)

    @property
    def after(self) -> tuple[DeviceMemory, ...]:
        """Each device at the end of the block; `InputError` if no block has ended."""
        return _of_the_block(self._after)

    @property
    def grown_bytes(self) -> dict[str, int]:
        """Bytes allocated after the block minus bytes before it, by device; may be negative.

        Raises:
            InputError: no block has ended.
        """
        before = {memory.device: memory.allocated_bytes for memory in self.before}
        return {memory.device: memory.allocated_bytes - before.get(memory.device, 0) for memory in self.after}

    @property
    def line(self) -> str:
        """The bytes that are allocated on all devices."""
        now = self._after or self.devices
        return f"{format_bytes(sum(each.allocated_bytes for each in now))} allocated on {len(now)} devices"

    def __str__(self) -> str:
        grown = {} if self._after is None else self.grown_bytes
        rows = [
            (
                memory.device,
                format_bytes(memory.allocated_bytes),
                *([format_bytes(grown[memory.device])] if grown else []),
                "unknown" if memory.peak_bytes is None else format_bytes(memory.peak_bytes),
                "unknown" if memory.limit_bytes is None else format_bytes(memory.limit_bytes),
                memory.source,
            )
            for memory in (self._after or self.devices)
        ]
        columns = ("device", "allocated", *(["grown"] if grown else []), "peak", "limit", "source")
        return aligned(columns, rows, right={"allocated", "grown", "peak", "limit"})


def _of_the_block(devices: tuple[DeviceMemory, ...] | None) -> tuple[DeviceMemory, ...]:
    if devices is None:
        raise InputError(
            "no block of code has ended under this measurement",
            hint="use it as `with mw.memory() as used: ...`, and read it after the block",
        )
    return devices


def memory() -> Memory:
    """Return the memory of all devices of this process: jax's, and torch's CUDA devices if torch uses CUDA.

    The numbers are those of the runtime's allocator if it keeps statistics, or else (on a CPU) the bytes of
    live jax arrays.
    Not counted: numpy's and torch's arrays on the host (`footprint` counts those of a tree).

    Example:
        >>> import jax.numpy as jnp
        >>> with memory() as used:
        ...     array = (jnp.ones((32, 32)) + 1).block_until_ready()
        >>> used.grown_bytes["cpu:0"] >= 32 * 32 * 4
        True
    """
    return Memory()


def _devices() -> tuple[DeviceMemory, ...]:
    import jax

    statistics = {device: device.memory_stats() for device in jax.local_devices()}
    live = _live_bytes() if not all(statistics.values()) else Counter()
    devices: list[DeviceMemory] = []
    for device, stats in statistics.items():
        peak = stats.get("peak_bytes_in_use") if stats else None
        devices.append(
            DeviceMemory(
                device=f"{device.platform}:{device.id}",
                allocated_bytes=stats["bytes_in_use"] if stats else live[device],
                peak_bytes=peak,
                limit_bytes=stats.get("bytes_limit") if stats else None,
                source="the runtime's allocator" if stats else LIVE_ARRAYS,
                why_no_peak=NO_PEAK if peak is None else "",
            )
        )
    return (*devices, *_torch_devices())


def _live_bytes() -> Counter[Any]:
    """Sum the bytes of live jax arrays by device, counting each buffer once."""
    import jax

    buffers = {buffer[:2]: buffer[2] for array in jax.live_arrays() for buffer in buffers_of(array)}
    totals: Counter[Any] = Counter()
    for (device, _), num_bytes in buffers.items():
        totals[device] += num_bytes
    return totals


def _torch_devices() -> list[DeviceMemory]:
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


UNKNOWN, NOT_SOUGHT = "unknown", "not sought"
MOST_OWNED = 200  # arrays from which the search starts, the largest: it takes time
DEPTH = 8  # levels of nested containers that the search climbs
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType)
_READING_LOCALS = threading.Lock()  # one thread must not empty a dict that another one reads


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveArray:
    """Arrays with the same shape, format, sharding and owner; `num_bytes` is their total over all devices."""

    shape: tuple[int, ...]
    format: str
    sharding: str
    count: int
    num_bytes: int
    owner: str  # "module.name", "Class.attribute", "local x of train (loop.py)", "unknown" or "not sought"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Live(OneLine):
    """The arrays that are alive; `str` of it is a table. `total_bytes` includes the rows beyond `top`."""

    total_bytes: int
    arrays: tuple[LiveArray, ...]

    def __str__(self) -> str:
        rows = [
            (
                format_bytes(row.num_bytes),
                str(row.count),
                f"{row.format}{list(row.shape)}",
                row.sharding,
                row.owner,
            )
            for row in self.arrays
        ]
        columns = ("size", "arrays", "shape", "sharding", "owner")
        title = f"{format_bytes(self.total_bytes)} of jax arrays are alive"
        return "\n".join(
            [title, aligned(columns, rows, right={"size", "arrays"}, indent="  ")] if rows else [title]
        )


def live(*, top: int | None = None) -> Live:
    """List the jax arrays of this process that are alive, the largest first.

    An owner is an object that refers to an array: a module's global, an attribute of an object or class, a
    local variable of a running function, or a function's closure. The reference may pass through lists,
    tuples, sets and dicts. If there are several owners, the nearest is named. The search starts from the 200
    largest arrays; of the others it finds only those in the same containers. An array whose memory is all in
    another array's buffers (a shard that was looked at, for example) is left out.

    Args:
        top: the maximum number of rows.

    Example:
        >>> import jax.numpy as jnp
        >>> array = jnp.ones((5, 7))
        >>> [row.num_bytes for row in live().arrays if row.shape == (5, 7)]
        [140]
    """
    import jax

    arrays, sizes = _without_shards([array for array in jax.live_arrays() if not array.is_deleted()])
    arrays.sort(key=lambda array: sizes[id(array)], reverse=True)
    count: Counter[tuple[Any, ...]] = Counter()
    total: Counter[tuple[Any, ...]] = Counter()
    for array, owner in zip(arrays, _owners(arrays), strict=True):
        key = (array.shape, format_name(array.dtype), _sharding(array), owner)
        count[key] += 1
        total[key] += sizes[id(array)]
    names = ("shape", "format", "sharding", "owner")
    rows = [
        LiveArray(**dict(zip(names, key, strict=True)), count=count[key], num_bytes=num_bytes)
        for key, num_bytes in total.most_common(top)
    ]
    return Live(total_bytes=total.total(), arrays=tuple(rows))


def _without_shards(arrays: list[Any]) -> tuple[list[Any], dict[int, int]]:
    """Drop arrays whose buffers all belong to others; return the rest, and the bytes of each by `id`."""
    seen: set[tuple[Any, int]] = set()
    kept: list[Any] = []
    sizes: dict[int, int] = {}
    # Arrays on the most devices first, so that their shards are recognised.
    for array in sorted(arrays, key=lambda a: -len(a.sharding.device_set)):
        buffers = buffers_of(array)
        places = {(device, address) for device, address, num_bytes in buffers if num_bytes}
        if not places or not places <= seen:
            kept.append(array)
            sizes[id(array)] = sum(num_bytes for _, _, num_bytes in buffers)
        seen |= places
    return kept, sizes


def _sharding(array: Any) -> str:
    """Describe a sharding as "P('data', None) on 8 devices", or as the name of its only device."""
    devices = array.sharding.device_set
    if len(devices) == 1:
        device = next(iter(devices))
        return f"{device.platform}:{device.id}"
    spec = getattr(array.sharding, "spec", None)
    return f"{type(array.sharding).__name__ if spec is None else spec} on {len(devices)} devices"


def _owners(arrays: list[Any]) -> list[str]:
    """Describe the nearest owner of each array.

    Each level takes one pass over Python's objects for all arrays together: first the objects that refer to
    the arrays, then those that refer to these containers, and so on.
    """
    with _READING_LOCALS:
        local = _locals()
    owners = {id(array): owner for array in arrays if (owner := local.get(id(array)))}
    # By container: the arrays below it, each with the name of the entry that leads to it.
    leads: dict[int, dict[int, str]] = {
        id(array): {id(array): ""} for array in arrays if id(array) not in owners
    }
    level: list[Any] = [array for array in arrays if id(array) in leads][:MOST_OWNED]
    sought = {id(array) for array in level}
    own = {id(arrays), id(level)}
    climbed: dict[int, set[int]] = {}  # by container, the arrays already followed through it
    for _ in range(DEPTH):
        holders = [holder for holder in gc.get_referrers(*level) if id(holder) not in own] if level else []
        above: list[Any] = []
        above_leads: dict[int, dict[int, str]] = {}
        for holder in holders:
            before = climbed.setdefault(id(holder), set())
            below: dict[int, str] = {}
            for array, name, owner in _reached(holder, leads):
                if array in owners or array in before:
                    continue
                if owner := owner or local.get(id(holder)):
                    owners[array] = owner
                else:
                    below[array] = name
            if below and (isinstance(holder, _CONTAINERS) or hasattr(holder, "__dict__")):
                above_leads[id(holder)] = below
                above.append(holder)
                before |= below.keys()
        level, leads = above[:MOST_OWNED], above_leads
        own |= {id(level), id(above), id(holders)}
    return [owners.get(id(array), UNKNOWN if id(array) in sought else NOT_SOUGHT) for array in arrays]


def _reached(holder: Any, leads: dict[int, dict[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield `id`, entry name and description of each array below the objects that `holder` refers to.

    A module, a class or an object has a description for each entry, a function has one for all entries, and a
    container has none.
    """
    title, fields = _title(holder), getattr(holder, "__dict__", None)
    entries: dict[int, str] | None = None
    # An object refers to its attributes directly until its `__dict__` is first read, and then to that dict.
    attributes = _copied(fields).values() if isinstance(fields, dict) else ()
    for held in {id(held): held for held in (*gc.get_referents(holder), *attributes)}.values():
        arrays = leads.get(id(held))
        if not arrays:
            continue
        entries = _entries(holder) if entries is None else entries  # few holders lead to an array
        entry = entries.get(id(held), "")
        of_fields = held is fields or (isinstance(holder, type) and isinstance(held, dict))
        for array, came_by in arrays.items():
            name = entry or came_by
            if isinstance(holder, FunctionType):
                yield array, name, title
            else:
                yield array, name, f"{title}.{name}" if title and name and (entry or of_fields) else ""


def _locals() -> dict[int, str]:
    """Return the local variables of every running function in every thread: words by `id`.

    This module's functions and their callees are left out. They end before the answer is used, and then the
    `id` of an object that they held may belong to another object.
    """
    known: dict[int, str] = {}
    # Remove frames one by one: a variable that still held this function's frame would keep its objects alive.
    frames = sys._current_frames()
    while frames:
        frame: FrameType | None = frames.popitem()[1]
        for _ in range(_num_own(frame)):
            frame = frame.f_back if frame is not None else None
        while frame is not None:
            if frame.f_code.co_name != "<module>":
                words = f"of {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]})"
                for name, number in _locals_of(frame).items():
                    known.setdefault(number, f"local {name} {words}")
            frame = frame.f_back
    return known


def _num_own(frame: FrameType | None) -> int:
    """Return the number of frames up to this module's outermost one; 0 in a thread without any."""
    number = last = 0
    while frame is not None:
        number += 1
        if frame.f_globals.get("__name__") == __name__:
            last = number
        frame = frame.f_back
    return last


def _locals_of(frame: FrameType) -> dict[str, int]:
    """Return the `id` of each local variable.

    Up to Python 3.12, a function's frame keeps the copy that `f_locals` makes, and so every array that the
    function deletes later. Therefore this empties the copy, with two exceptions. Another holder (through
    `locals()`) has it too: then it has more references than those of the frame, this function and the call.
    Or a debugger or similar tool watches: Python writes the copy back into the variables when a trace
    function returns.
    """
    copy = frame.f_locals
    numbers = {name: id(value) for name, value in _copied(copy).items()}
    watched = sys.gettrace() or threading.gettrace() or frame.f_trace
    optimised = frame.f_code.co_flags & CO_OPTIMIZED
    if isinstance(copy, dict) and optimised and not watched and sys.getrefcount(copy) == 3:
        copy.clear()
    return numbers


def _copied(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copy a mapping in one operation, because other threads may change it meanwhile."""
    return dict.copy(mapping) if isinstance(mapping, dict) else dict(mapping)


def _entries(holder: Any) -> dict[int, str]:
    """Return the names under which a dict or an object holds its values, by the `id` of the value."""
    if isinstance(holder, dict):
        pairs = _copied(holder)
    elif isinstance(holder, type | ModuleType):
        return {}
    else:
        declared = [kind.__dict__.get("__slots__", ()) for kind in type(holder).__mro__]
        slots = {name for names in declared for name in ([names] if isinstance(names, str) else names)}
        pairs = {name: getattr(holder, name, None) for name in slots if not name.startswith("__")}
        fields = getattr(holder, "__dict__", None)
        pairs |= _copied(fields) if isinstance(fields, dict) else {}
    return {id(value): name for name, value in reversed(pairs.items()) if isinstance(name, str)}


def _title(holder: Any) -> str:
    """Return the name of a module (by its dict), a class, an object's class or a function; "" for others."""
    if isinstance(holder, dict):
        module = sys.modules.get(name) if isinstance(name := holder.get("__name__"), str) else None
        return module.__name__ if module is not None and module.__dict__ is holder else ""
    if isinstance(holder, FunctionType):
        return f"closure of {holder.__qualname__}"
    if isinstance(holder, type):
        return holder.__qualname__
    return "" if isinstance(holder, (ModuleType, *_CONTAINERS)) else type(holder).__qualname__
