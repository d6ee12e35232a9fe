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
from ._storages import format_name

UNKNOWN = "unknown"
MOST_OWNED = 2000
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
    owners = _Owners()
    count: Counter[tuple[Any, ...]] = Counter()
    size: Counter[tuple[Any, ...]] = Counter()
    for place, array in enumerate(arrays):
        owner = owners.of(array, hidden=arrays) if place < MOST_OWNED else UNKNOWN
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
        buffers = {
            (s.device, s.data.unsafe_buffer_pointer()) for s in array.addressable_shards if s.data.nbytes
        }
        if not buffers or not buffers <= seen:
            kept.append(array)
        seen |= buffers
    return kept


def _bytes(array: Any) -> int:
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def _sharding(array: Any) -> str:
    """ "P('data', None) on 8 devices", or the one device."""
    devices = array.sharding.device_set
    if len(devices) == 1:
        device = next(iter(devices))
        return f"{device.platform}:{device.id}"
    spec = getattr(array.sharding, "spec", None)
    return f"{type(array.sharding).__name__ if spec is None else spec} on {len(devices)} devices"


class _Owners:
    """Finds who refers to an object. Frames are looked at once: those of this package's are left out."""

    def __init__(self) -> None:
        self._locals: dict[int, str] = {}
        for frame in sys._current_frames().values():
            self._note(frame)

    def _note(self, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_globals.get("__name__") != __name__ and frame.f_code.co_name != "<module>":
                words = f"of {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]})"
                for name, value in frame.f_locals.items():
                    self._locals.setdefault(id(value), f"local {name} {words}")
            frame = frame.f_back

    def of(self, target: Any, *, hidden: Any) -> str:
        """Words for the nearest owner; `hidden` is a list of our own that refers to everything."""
        seen = {id(hidden), id(self.__dict__), id(self._locals)}
        level = [target]
        for _ in range(DEPTH):
            above: list[Any] = []
            for one in level:
                if id(one) in self._locals:
                    return self._locals[id(one)]
                for holder in gc.get_referrers(one):
                    if id(holder) in seen or holder is level or holder is above:
                        continue
                    seen.add(id(holder))
                    if words := _named(holder, one):
                        return words
                    if isinstance(holder, dict | list | tuple) or hasattr(holder, "__dict__"):
                        above.append(holder)
            level = above
        return UNKNOWN


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
