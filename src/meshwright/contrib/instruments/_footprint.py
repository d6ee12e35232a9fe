"""Count the bytes of existing arrays of jax, numpy and torch, with shared storage counted once.

Counted: every storage that the arrays keep alive, in full, even if a view uses only some of it.
Not counted: Python's objects around the arrays, the allocator's rounding, memory of other processes.
"""

from __future__ import annotations

import numbers
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import InputError
from meshwright.reportable import OneLine
from meshwright.units import aligned, format_bytes

from ._array_storages import ArrayFootprint, Storage, array_footprint

MOST_ROWS = 60  # of a larger tree, `str` shows only the largest arrays
PATH_COLUMNS, OTHER_PATH_COLUMNS = 37, 21  # of an array's path; of the path it shares storage with


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Footprint(OneLine):
    """The memory of the arrays of a tree; `str` of it is a table.

    `total_bytes`: every storage once, over all devices. `by_device`: device -> number format -> bytes.
    `not_arrays`: paths of Python numbers and None, which hold no array memory.
    """

    total_bytes: int
    by_device: dict[str, dict[str, int]]
    arrays: tuple[ArrayFootprint, ...]
    not_arrays: tuple[str, ...]

    def __str__(self) -> str:
        libraries = {array.library for array in self.arrays}
        mixed = len(libraries) > 1
        title = f"{format_bytes(self.total_bytes)} in {len(self.arrays)} array{'s' * (len(self.arrays) != 1)}"
        title += f" of {libraries.pop()}" if len(libraries) == 1 else ""
        lines = [f"{title} ({places})" if (places := _places(self.by_device)) else title]
        largest = sorted(range(len(self.arrays)), key=lambda place: -self.arrays[place].storage_bytes)
        shown = [self.arrays[place] for place in sorted(largest[:MOST_ROWS])]
        rows = [
            (
                _short(array.path, PATH_COLUMNS),
                *([array.library] if mixed else []),
                f"{array.format}{list(array.shape)}",
                format_bytes(array.num_bytes),
                "" if array.strides is None else str(array.strides),
                "contiguous" if array.contiguous else "strided",
                _sharing(array),
            )
            for array in shown
        ]
        if rows:
            columns = (
                "array",
                *(["library"] if mixed else []),
                "shape",
                "size",
                "strides",
                "layout",
                "storage",
            )
            lines.append(aligned(columns, rows, right={"size"}, indent="  "))
        if left := len(self.arrays) - len(shown):
            lines.append(f"  and {left} arrays that are no larger")
        if self.not_arrays:
            few = ", ".join(_short(path, OTHER_PATH_COLUMNS) for path in self.not_arrays[:3])
            more = f" and {len(self.not_arrays) - 3} more" * (len(self.not_arrays) > 3)
            lines.append(f"  numbers and None, without array memory: {few}{more}")
        return "\n".join(lines)


def _places(by_device: dict[str, dict[str, int]]) -> str:
    """List bytes by device, equal ones together: "cpu:0: fp32 48 B, bf16 2 B; 8 devices, each: fp32 32 B"."""
    devices_by_text: dict[str, list[str]] = {}
    for device, formats in by_device.items():
        text = ", ".join(f"{name} {format_bytes(size)}" for name, size in formats.items())
        devices_by_text.setdefault(text, []).append(device)
    places: list[str] = []
    for text, devices in devices_by_text.items():
        names = " and ".join(devices) if len(devices) <= 2 else f"{len(devices)} devices"
        places.append(f"{names}{', each' * (len(devices) > 1)}: {text}")
    return "; ".join(places)


def _short(path: str, columns: int) -> str:
    """Shorten a long path by cutting its middle."""
    half = (columns - 3) // 2
    return path if len(path) <= columns else f"{path[:half]}...{path[-half:]}"


def _sharing(array: ArrayFootprint) -> str:
    if array.shares_storage_with is not None:
        return f"that of {_short(array.shares_storage_with, OTHER_PATH_COLUMNS)}"
    if len(array.devices) > 1:
        return f"{format_bytes(array.storage_bytes)} on {len(array.devices)} devices"
    if array.storage_bytes == array.num_bytes:
        return "its own"
    return f"a part of {format_bytes(array.storage_bytes)}"


def footprint(tree: Any, /) -> Footprint:
    """Count the memory of the arrays of `tree`.

    Args:
        tree: any pytree, a `torch.nn.Module` (its parameters and buffers), or arrays of jax, numpy or torch.
            A `jax.ShapeDtypeStruct` counts what its array would take; a torch tensor on the meta device or a
            fake tensor counts what it represents. For a global array, only the shards of this process count.

    Raises:
        InputError: a leaf is neither an array nor a number, or is a traced value, a deleted jax array, an
            array of Python objects or with a mask, or a torch tensor without a single storage; the message
            names its path. Or a dict has keys that cannot be sorted.

    Example:
        >>> import numpy as np
        >>> base = np.zeros((4, 8), np.float32)
        >>> footprint({"base": base, "row": base[0]}).total_bytes
        128
    """
    arrays: list[ArrayFootprint] = []
    not_arrays: list[str] = []
    known = _KnownMemory()
    for path, leaf in _leaves(tree):
        if leaf is None or (isinstance(leaf, numbers.Number) and not hasattr(leaf, "dtype")):
            not_arrays.append(path)
            continue
        alone = array_footprint(leaf, path)
        arrays.append(replace(alone, shares_storage_with=known.add(alone)))
    return Footprint(
        total_bytes=sum(sum(formats.values()) for formats in known.by_device.values()),
        by_device=known.by_device,
        arrays=tuple(arrays),
        not_arrays=tuple(not_arrays),
    )


class _KnownMemory:
    """The memory counted so far: intervals of host memory, and other storages by device and address."""

    def __init__(self) -> None:
        self.by_device: dict[str, dict[str, int]] = {}
        self._intervals: list[tuple[int, int, int]] = []  # disjoint, in order: start, end, place in _paths
        self._paths: list[str] = []  # of the arrays that added an interval, in the tree's order
        self._storages: dict[tuple[str, int], str] = {}

    def add(self, array: ArrayFootprint) -> str | None:
        """Count the new bytes of an array's storages; return the path of the first array that shares one."""
        shared: str | None = None
        for storage in array.storages:
            new_bytes, owner = self._new(array.path, storage)
            shared = shared or owner
            if new_bytes or owner is None:
                formats = self.by_device.setdefault(storage.device, {})
                formats[array.format] = formats.get(array.format, 0) + new_bytes
        return shared

    def _new(self, path: str, storage: Storage) -> tuple[int, str | None]:
        if storage.address is None or not storage.num_bytes:
            return storage.num_bytes, None
        if storage.host:
            return self._new_on_host(path, storage.address, storage.address + storage.num_bytes)
        owner = self._storages.setdefault((storage.device, storage.address), path)
        return (storage.num_bytes, None) if owner == path else (0, owner)

    def _new_on_host(self, path: str, start: int, end: int) -> tuple[int, str | None]:
        """Return the number of new bytes from `start` to `end`, and the first owner of the known ones.

        Libraries may share only some bytes of a block.
        """
        first = bisect_left(self._intervals, (start,))
        if first and self._intervals[first - 1][1] > start:
            first -= 1
        last = bisect_left(self._intervals, (end,))
        met = self._intervals[first:last]
        borders = [start, *(border for known in met for border in known[:2]), end]
        gaps = [(low, high) for low, high in zip(borders[::2], borders[1::2], strict=True) if low < high]
        if gaps:
            mine = [(low, high, len(self._paths)) for low, high in gaps]
            self._paths.append(path)
            self._intervals[first:last] = sorted(met + mine)
        owner = self._paths[min(place for _, _, place in met)] if met else None
        return sum(high - low for low, high in gaps), owner


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path; a torch module yields its parameters and buffers instead."""
    import jax

    try:
        flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    except (TypeError, ValueError, RuntimeError) as error:  # raised when keys are compared
        raise InputError(
            f"the tree cannot be walked: {str(error).partition(chr(10))[0]}",
            hint="the keys of a dict must sort, so be all strings or all numbers; else give its values, "
            "list(tree.values()); of a torch optimizer, give optimizer.state_dict()",
        ) from error
    torch = sys.modules.get("torch")
    for keys, leaf in flat:
        path = "".join(map(_key_text, keys)).lstrip(".")
        if torch is not None and isinstance(leaf, torch.nn.Module):
            # A tied parameter comes under each of its names, and shares storage with itself.
            for name, tensor in (
                *leaf.named_parameters(remove_duplicate=False),
                *leaf.named_buffers(remove_duplicate=False),
            ):
                yield (f"{path}.{name}" if path else name), tensor
        else:
            yield path or "the array", leaf


def _key_text(key: Any) -> str:
    """Return one step of a path as Python would write it: ".weight", "[0]"."""
    import jax

    if isinstance(key, jax.tree_util.SequenceKey):
        return f"[{key.idx}]"
    name = key.name if isinstance(key, jax.tree_util.GetAttrKey) else key.key
    return f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"
