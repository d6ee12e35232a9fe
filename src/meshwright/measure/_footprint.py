"""Bytes of arrays that exist, of any of three libraries, shared storage counted once.

Counted: the storages that the arrays keep alive, whole, also where a view uses a part of one. Not counted:
Python's own objects around them, the allocator's rounding, what other processes hold.
"""

from __future__ import annotations

import numbers
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..units import aligned, format_bytes
from ._storages import Facts, Storage, facts_of

MOST_ROWS = 60  # of a larger tree, `str` shows its largest arrays
PATH_COLUMNS, OTHER_PATH_COLUMNS = 37, 21  # of an array's path in the table, of one it names


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFootprint:
    """One array of a tree.

    `num_bytes`: elements x bytes each, of the global shape. `storage_bytes`: of the storages it keeps alive,
    on all devices that this process sees. `strides` and `offset_elements` count elements; None where the
    library does not show them (jax). `shares_storage_with`: the path of the first array in the tree with the
    same memory.
    """

    path: str
    library: str  # jax | numpy | torch
    shape: tuple[int, ...]
    format: str
    devices: tuple[str, ...]
    num_bytes: int
    storage_bytes: int
    strides: tuple[int, ...] | None
    offset_elements: int | None
    contiguous: bool
    is_view: bool
    shares_storage_with: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What the arrays of a tree take; `str` of it is a table.

    `total_bytes`: all storages, each once, over all devices. `by_device`: device to number format to bytes.
    `not_arrays`: paths of Python's numbers and None, which hold no array's memory.
    """

    total_bytes: int
    by_device: dict[str, dict[str, int]]
    arrays: tuple[ArrayFootprint, ...]
    not_arrays: tuple[str, ...]

    def __str__(self) -> str:
        libraries = {array.library for array in self.arrays}
        words = f"{format_bytes(self.total_bytes)} in {len(self.arrays)} array{'s' * (len(self.arrays) != 1)}"
        if len(libraries) == 1:
            words += f" of {self.arrays[0].library}"
        lines = [f"{words} ({places})" if (places := _places(self.by_device)) else words]
        largest = sorted(range(len(self.arrays)), key=lambda place: -self.arrays[place].storage_bytes)
        shown = [self.arrays[place] for place in sorted(largest[:MOST_ROWS])]
        rows = [
            (
                _short(array.path, PATH_COLUMNS),
                *([array.library] if len(libraries) > 1 else []),
                f"{array.format}{list(array.shape)}",
                format_bytes(array.num_bytes),
                "" if array.strides is None else str(array.strides),
                "contiguous" if array.contiguous else "strided",
                _sharing(array),
            )
            for array in shown
        ]
        header = ("array", *(["library"] if len(libraries) > 1 else []))
        header = (*header, "shape", "size", "strides", "layout", "storage")
        if rows:
            lines.append(aligned(header, rows, right={"size"}, indent="  "))
        if left := len(self.arrays) - len(shown):
            lines.append(f"  and {left} arrays that are no larger")
        if self.not_arrays:
            few = ", ".join(_short(path, OTHER_PATH_COLUMNS) for path in self.not_arrays[:3])
            more = f" and {len(self.not_arrays) - 3} more" * (len(self.not_arrays) > 3)
            lines.append(f"  numbers and None, without array memory: {few}{more}")
        return "\n".join(lines)


def _places(by_device: dict[str, dict[str, int]]) -> str:
    """ "cpu:0: fp32 48 B, bf16 2 B; 8 devices, each: fp32 32 B": devices with the same bytes together."""
    alike: dict[str, list[str]] = {}
    for device, formats in by_device.items():
        words = ", ".join(f"{name} {format_bytes(size)}" for name, size in formats.items())
        alike.setdefault(words, []).append(device)
    return "; ".join(
        (devices[0] if len(devices) == 1 else f"{_several(devices)}, each") + f": {words}"
        for words, devices in alike.items()
    )


def _several(devices: list[str]) -> str:
    return " and ".join(devices) if len(devices) == 2 else f"{len(devices)} devices"


def _short(path: str, columns: int) -> str:
    """A long path without its middle."""
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
    """What the arrays of `tree` take.

    Args:
        tree: any pytree, a `torch.nn.Module` (its parameters and buffers), or arrays of jax, numpy or torch.
            A `jax.ShapeDtypeStruct` counts what it would take, a torch tensor on the meta device or a fake
            one what it stands for. Of a global array the shards of this process count.

    Raises:
        InputError: a leaf that is no array and no number, a traced value, a deleted jax array, an array of
            Python objects or with a mask, or a torch tensor without one storage; its path is named. Or a
            dict whose keys cannot be sorted.
    """
    arrays: list[ArrayFootprint] = []
    not_arrays: list[str] = []
    known = _Known()
    for path, leaf in _leaves(tree):
        if leaf is None or (isinstance(leaf, numbers.Number) and not hasattr(leaf, "dtype")):
            not_arrays.append(path)
            continue
        facts = facts_of(leaf, path)
        arrays.append(_array(path, facts, known.add(path, facts)))
    return Footprint(
        total_bytes=sum(sum(formats.values()) for formats in known.by_device.values()),
        by_device=known.by_device,
        arrays=tuple(arrays),
        not_arrays=tuple(not_arrays),
    )


def _array(path: str, facts: Facts, shares: str | None) -> ArrayFootprint:
    return ArrayFootprint(
        path=path,
        library=facts.library,
        shape=facts.shape,
        format=facts.format,
        devices=tuple(storage.device for storage in facts.storages),
        num_bytes=facts.num_bytes,
        storage_bytes=sum(storage.num_bytes for storage in facts.storages),
        strides=facts.strides,
        offset_elements=facts.offset_elements,
        contiguous=facts.contiguous,
        is_view=facts.is_view,
        shares_storage_with=shares,
    )


class _Known:
    """The memory seen so far: intervals of the host's, other storages by their device and address."""

    def __init__(self) -> None:
        self.by_device: dict[str, dict[str, int]] = {}
        self._intervals: list[tuple[int, int, int]] = []  # disjoint, in order: start, end, place in _paths
        self._paths: list[str] = []  # of the arrays that brought an interval, in the tree's order
        self._storages: dict[tuple[str, int], str] = {}

    def add(self, path: str, facts: Facts) -> str | None:
        """Count what is new of an array's storages; the path of the first array that shares one."""
        shared: str | None = None
        for storage in facts.storages:
            new_bytes, owner = self._new(path, storage)
            shared = shared or owner
            if new_bytes or owner is None:
                formats = self.by_device.setdefault(storage.device, {})
                formats[facts.format] = formats.get(facts.format, 0) + new_bytes
        return shared

    def _new(self, path: str, storage: Storage) -> tuple[int, str | None]:
        if storage.address is None or not storage.num_bytes:
            return storage.num_bytes, None
        if storage.host:
            return self._new_on_host(path, storage.address, storage.address + storage.num_bytes)
        owner = self._storages.setdefault((storage.device, storage.address), path)
        return (storage.num_bytes, None) if owner == path else (0, owner)

    def _new_on_host(self, path: str, start: int, end: int) -> tuple[int, str | None]:
        """The bytes from `start` to `end` that lie in no interval yet. Libraries share parts of blocks."""
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
    """Every leaf with its path; a torch module's parameters and buffers in its place."""
    import jax

    try:
        flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    except (TypeError, ValueError, RuntimeError) as error:  # as the keys' own comparison raises
        raise InputError(
            f"the tree cannot be walked: {str(error).partition(chr(10))[0]}",
            hint="the keys of a dict must sort, so be all strings or all numbers; else give its values, "
            "list(tree.values()); of a torch optimizer, give optimizer.state_dict()",
        ) from error
    for keys, leaf in flat:
        path = "".join(_part(key) for key in keys).lstrip(".")
        if _is_torch_module(leaf):
            yield from _of_module(path, leaf)
        else:
            yield path or "the array", leaf


def _is_torch_module(leaf: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.nn.Module)


def _of_module(path: str, module: Any) -> Iterator[tuple[str, Any]]:
    """A tied parameter under each of its names: it shares its storage with itself."""
    before = f"{path}." if path else ""
    for name, tensor in module.named_parameters(remove_duplicate=False):
        yield before + name, tensor
    for name, tensor in module.named_buffers(remove_duplicate=False):
        yield before + name, tensor


def _part(key: Any) -> str:
    """One step of a path as Python would write it: ".weight", "[0]"."""
    import jax

    if isinstance(key, jax.tree_util.SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, jax.tree_util.GetAttrKey):
        return f".{key.name}"
    name = key.key
    return f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"
