"""The jax arrays that are alive now: how large, how split, and who holds them."""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from ..tables import aligned
from ..units import format_bytes
from ._storages import buffers_of, format_name

UNKNOWN, NOT_SOUGHT = "unknown", "not sought"
MOST_OWNED = 200
"""Of more arrays than these only the largest are asked for their owner: the search takes time."""
DEPTH = 8  # containers inside containers that the search climbs
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveArray:
    """Arrays alike in shape, format, sharding and owner. `num_bytes`: of all of them, on all devices."""

    shape: tuple[int, ...]
    format: str
    sharding: str
    count: int
    num_bytes: int
    owner: str  # "module.name", "Class.attribute", "local x of train (loop.py)", "unknown" or "not sought"


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What is alive; `str` of it is a table. `total_bytes`: of all, also of those beyond `top`."""

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
    """The jax arrays of this process that are alive, the largest first.

    An owner is who refers to an array: a module's global, an attribute of an object or class, a local
    variable of a running function, a function's closure, through lists, tuples, sets and dicts. Of several
    the nearest is told; of all but the 200 largest arrays it is not sought. What lies in another array's
    buffers (a shard that was looked at, say) is left out.

    Args:
        top: at most so many rows.
    """
    import jax

    arrays = _without_parts([array for array in jax.live_arrays() if not array.is_deleted()])
    arrays.sort(key=_bytes, reverse=True)
    owned = arrays[:MOST_OWNED]
    owners = [*_owners(owned), *(NOT_SOUGHT for _ in arrays[MOST_OWNED:])]
    count: Counter[tuple[Any, ...]] = Counter()
    size: Counter[tuple[Any, ...]] = Counter()
    for array, owner in zip(arrays, owners, strict=True):
        key = (array.shape, format_name(array.dtype), _sharding(array), owner)
        count[key] += 1
        size[key] += _bytes(array)
    groups = [
        LiveArray(
            shape=key[0], format=key[1], sharding=key[2], count=count[key], num_bytes=num_bytes, owner=key[3]
        )
        for key, num_bytes in size.most_common(top)
    ]
    return Live(total_bytes=size.total(), arrays=tuple(groups))


def _without_parts(arrays: list[Any]) -> list[Any]:
    """The arrays, the most divided first, without those all of whose buffers are another's."""
    seen: set[tuple[Any, int]] = set()
    kept: list[Any] = []
    for array in sorted(arrays, key=lambda a: -len(a.sharding.device_set)):
        buffers = {(device, address) for device, address, num_bytes in buffers_of(array) if num_bytes}
        if not buffers or not buffers <= seen:
            kept.append(array)
        seen |= buffers
    return kept


def _bytes(array: Any) -> int:
    return sum(num_bytes for _, _, num_bytes in buffers_of(array))


def _sharding(array: Any) -> str:
    """ "P('data', None) on 8 devices", or the one device."""
    devices = array.sharding.device_set
    if len(devices) == 1:
        device = next(iter(devices))
        return f"{device.platform}:{device.id}"
    spec = getattr(array.sharding, "spec", None)
    return f"{type(array.sharding).__name__ if spec is None else spec} on {len(devices)} devices"


def _owners(arrays: list[Any]) -> list[str]:
    """Words for the nearest owner of each array.

    One pass over Python's objects for each level, for all arrays together: who refers to them, who refers
    to those containers, and so on.
    """
    local = _locals()
    found = {id(array): words for array in arrays if (words := local.get(id(array)))}
    level: list[Any] = [array for array in arrays if id(array) not in found]
    # By container: the arrays that lie below it, each with the name of the entry that leads to it.
    leads: dict[int, dict[int, str]] = {id(array): {id(array): ""} for array in level}
    own = {id(arrays), id(level)}
    climbed: dict[int, set[int]] = {}  # by container, the arrays that have come through it
    for _ in range(DEPTH):
        holders = [holder for holder in gc.get_referrers(*level) if id(holder) not in own] if level else []
        above: list[Any] = []
        above_leads: dict[int, dict[int, str]] = {}
        for holder in holders:
            below: dict[int, str] = {}
            before = climbed.setdefault(id(holder), set())
            for held in {id(held): held for held in gc.get_referents(holder)}.values():
                entry = _entry(holder, held)
                for array, came_by in leads.get(id(held), {}).items():
                    if array in found or array in before:
                        continue
                    if words := _named(holder, held, entry or came_by) or local.get(id(holder)):
                        found[array] = words
                    else:
                        below[array] = entry or came_by
            if below and (isinstance(holder, _CONTAINERS) or hasattr(holder, "__dict__")):
                above_leads[id(holder)] = below
                above.append(holder)
                before |= below.keys()
        level, leads = above[:MOST_OWNED], above_leads
        own |= {id(level), id(above), id(holders)}
    return [found.get(id(array), UNKNOWN) for array in arrays]


def _locals() -> dict[int, str]:
    """Local variables of every running function of every thread, this module's own left out."""
    known: dict[int, str] = {}
    # Taken out one by one: a variable that still held this function's own frame would keep all it refers to.
    frames = sys._current_frames()
    while frames:
        frame: FrameType | None = frames.popitem()[1]
        while frame is not None:
            if frame.f_globals.get("__name__") != __name__ and frame.f_code.co_name != "<module>":
                words = f"of {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]})"
                for name, number in _locals_of(frame).items():
                    known.setdefault(number, f"local {name} {words}")
            frame = frame.f_back
    return known


def _locals_of(frame: FrameType) -> dict[str, int]:
    """The `id` of each local variable.

    Up to Python 3.12 a function's frame keeps the copy that `f_locals` makes, and thereby every array that
    the function deletes later. So the copy is emptied, unless somebody else (by `locals()`) has it too:
    then there are more references than the frame's, this function's and the call's.
    """
    copy = frame.f_locals
    numbers = {name: id(value) for name, value in copy.items()}
    if isinstance(copy, dict) and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(copy) == 3:
        copy.clear()
    return numbers


def _entry(holder: Any, held: Any) -> str:
    """The name under which a dict or an object holds something; empty if it has none."""
    if isinstance(holder, dict):
        pairs = holder.items()
    elif isinstance(holder, type | ModuleType):
        return ""
    else:
        slots = {name for kind in type(holder).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))}
        pairs = [(name, getattr(holder, name, None)) for name in slots if not name.startswith("__")]
        fields = getattr(holder, "__dict__", None)
        pairs += fields.items() if isinstance(fields, dict) else []
    return next((name for name, value in list(pairs) if value is held and isinstance(name, str)), "")


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _named(holder: Any, held: Any, entry: str) -> str:
    """Words, if the holder is one to name: a module, a class, an object's attribute, a function."""
    if isinstance(holder, dict):
        module = sys.modules.get(name) if isinstance(name := holder.get("__name__"), str) else None
        return f"{module.__name__}.{entry}" if module is not None and module.__dict__ is holder else ""
    if isinstance(holder, FunctionType):
        return f"closure of {holder.__qualname__}"
    if isinstance(holder, type):
        return f"{holder.__qualname__}.{entry}" if entry and isinstance(held, dict) else ""
    if isinstance(holder, (ModuleType, *_CONTAINERS)):
        return ""
    is_attribute = _entry(holder, held) or getattr(holder, "__dict__", None) is held
    return f"{type(holder).__qualname__}.{entry}" if entry and is_attribute else ""
