"""The jax arrays that are alive now: how large, how split, and who holds them."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from ..tables import aligned
from ..units import format_bytes
from ._storages import buffers_of, format_name

UNKNOWN = "unknown"
MOST_OWNED = 200
"""Of more arrays than these only the largest are asked for their owner: the search takes time."""
DEPTH = 4  # containers inside containers that the search climbs


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveArray:
    """Arrays alike in shape, format, sharding and owner. `num_bytes`: of all of them, on all devices."""

    shape: tuple[int, ...]
    format: str
    sharding: str
    count: int
    num_bytes: int
    owner: str  # "module.name", "Class.attribute", "local x of train", or "unknown"


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

    An owner is who refers to an array: a module's global, an object's attribute, a local variable of a
    running function, through lists, tuples and dicts. What lies in another array's buffers (a shard that
    was looked at, say) is left out.

    Args:
        top: at most so many rows.
    """
    import jax

    arrays = _without_parts([array for array in jax.live_arrays() if not array.is_deleted()])
    arrays.sort(key=_bytes, reverse=True)
    owned = arrays[:MOST_OWNED]
    owners = [*_owners(owned), *(UNKNOWN for _ in arrays[MOST_OWNED:])]
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
    leads: dict[int, set[int]] = {id(array): {id(array)} for array in arrays if id(array) not in found}
    level: list[Any] = [array for array in arrays if id(array) not in found]
    seen = {id(arrays), id(level), id(leads), id(found), id(local)}
    for _ in range(DEPTH):
        holders = [holder for holder in gc.get_referrers(*level) if id(holder) not in seen] if level else []
        above: list[Any] = []
        above_leads: dict[int, set[int]] = {}
        for holder in holders:
            seen.add(id(holder))
            for held in gc.get_referents(holder):
                reached = leads.get(id(held), set()) - found.keys()
                if not reached:
                    continue
                if words := local.get(id(holder)) or _named(holder, held):
                    found.update(dict.fromkeys(reached, words))
                elif isinstance(holder, dict | list | tuple) or hasattr(holder, "__dict__"):
                    above_leads.setdefault(id(holder), set()).update(reached)
                    above.append(holder)
        level, leads = above, above_leads
        seen |= {id(level), id(leads), id(holders)}
    return [found.get(id(array), UNKNOWN) for array in arrays]


def _locals() -> dict[int, str]:
    """Local variables of every running function of every thread, this module's own left out."""
    known: dict[int, str] = {}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_globals.get("__name__") != __name__ and frame.f_code.co_name != "<module>":
                words = f"of {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]})"
                for name, value in frame.f_locals.items():
                    known.setdefault(id(value), f"local {name} {words}")
            frame = frame.f_back
    return known


def _named(holder: Any, held: Any) -> str:
    """The name under which a module or an object holds something, if it does so directly."""
    if isinstance(holder, dict):
        name = next((key for key, value in holder.items() if value is held), None)
        module = sys.modules.get(holder.get("__name__", "")) if "__name__" in holder else None
        if isinstance(module, ModuleType) and module.__dict__ is holder:
            return f"{module.__name__}.{name}"
        return ""
    fields = getattr(holder, "__dict__", None)
    if isinstance(fields, dict) and not isinstance(holder, ModuleType):
        name = next((key for key, value in fields.items() if value is held), None)
        if name is not None:
            return f"{type(holder).__name__}.{name}"
    return ""
