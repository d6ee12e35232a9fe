"""List the jax arrays that are alive now, with their sizes, shardings and owners."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from ..units import aligned, format_bytes
from ._storages import buffers_of, format_name

UNKNOWN, NOT_SOUGHT = "unknown", "not sought"
MOST_OWNED = 200
"""The search starts from so many arrays, the largest: it takes time. Others are found on its way."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The arrays that are alive; `str` of it is a table. `total_bytes` includes the rows beyond `top`."""

    total_bytes: int
    arrays: tuple[LiveArray, ...]

    def __str__(self) -> str:
        rows = [
            (
                format_bytes(group.num_bytes),
                str(group.count),
                f"{group.format}{list(group.shape)}",
                group.sharding,
                group.owner,
            )
            for group in self.arrays
        ]
        header = ("size", "arrays", "shape", "sharding", "owner")
        words = f"{format_bytes(self.total_bytes)} of jax arrays are alive"
        table = aligned(header, rows, right={"size", "arrays"}, indent="  ")
        return "\n".join([words, *([table] if rows else [])])


def live(*, top: int | None = None) -> Live:
    """List the jax arrays of this process that are alive, the largest first.

    An owner is an object that refers to an array: a module's global, an attribute of an object or class, a
    local variable of a running function, or a function's closure. The reference may pass through lists,
    tuples, sets and dicts. If there are several owners, the nearest is named. The search starts from the 200
    largest arrays; of the others it finds only those in the same containers. An array whose memory is all in
    another array's buffers (a shard that was looked at, for example) is left out.

    Args:
        top: the maximum number of rows.
    """
    import jax

    arrays, sizes = _whole([array for array in jax.live_arrays() if not array.is_deleted()])
    arrays.sort(key=lambda array: sizes[id(array)], reverse=True)
    count: Counter[tuple[Any, ...]] = Counter()
    size: Counter[tuple[Any, ...]] = Counter()
    for array, owner in zip(arrays, _owners(arrays), strict=True):
        key = (array.shape, format_name(array.dtype), _sharding(array), owner)
        count[key] += 1
        size[key] += sizes[id(array)]
    groups = [
        LiveArray(
            shape=key[0], format=key[1], sharding=key[2], count=count[key], num_bytes=num_bytes, owner=key[3]
        )
        for key, num_bytes in size.most_common(top)
    ]
    return Live(total_bytes=size.total(), arrays=tuple(groups))


def _whole(arrays: list[Any]) -> tuple[list[Any], dict[int, int]]:
    """Drop arrays whose buffers all belong to others; return the rest, and the bytes of each by `id`."""
    seen: set[tuple[Any, int]] = set()
    kept: list[Any] = []
    sizes: dict[int, int] = {}
    # Arrays on the most devices first, so that their shards are recognised.
    for array in sorted(arrays, key=lambda a: -len(a.sharding.device_set)):
        found = buffers_of(array)
        buffers = {(device, address) for device, address, num_bytes in found if num_bytes}
        if not buffers or not buffers <= seen:
            kept.append(array)
            sizes[id(array)] = sum(num_bytes for _, _, num_bytes in found)
        seen |= buffers
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
    found = {id(array): words for array in arrays if (words := local.get(id(array)))}
    # By container: the arrays below it, each with the name of the entry that leads to it.
    leads: dict[int, dict[int, str]] = {
        id(array): {id(array): ""} for array in arrays if id(array) not in found
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
            for array, name, words in _reached(holder, leads):
                if array in found or array in before:
                    continue
                if words := words or local.get(id(holder)):
                    found[array] = words
                else:
                    below[array] = name
            if below and (isinstance(holder, _CONTAINERS) or hasattr(holder, "__dict__")):
                above_leads[id(holder)] = below
                above.append(holder)
                before |= below.keys()
        level, leads = above[:MOST_OWNED], above_leads
        own |= {id(level), id(above), id(holders)}
    return [found.get(id(array), UNKNOWN if id(array) in sought else NOT_SOUGHT) for array in arrays]


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
        slots = {name for kind in type(holder).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))}
        pairs = {name: getattr(holder, name, None) for name in slots if not name.startswith("__")}
        fields = getattr(holder, "__dict__", None)
        pairs |= _copied(fields) if isinstance(fields, dict) else {}
    return {id(value): name for name, value in reversed(pairs.items()) if isinstance(name, str)}


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


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
