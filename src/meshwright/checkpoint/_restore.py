"""A checkpoint's arrays, put where a mesh wants them, whatever mesh they came from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..errors import InputError
from ._copy import Box, box_of, leaves_by_path
from ._manifest import Piece, StoredArray
from ._records import Found

Tree = Any
VECTOR_BYTES = 64  # jax's CPU devices take over host memory that begins at a multiple of this


def restore(found: Found, state: Tree, *, only: Iterable[str] = ()) -> Tree:
    """The arrays of a checkpoint, laid out as `state` says; shapes and formats must be the checkpoint's.

    Each device is given its shards and nothing else; nothing else is made on it. Host memory: one shard, and
    the pages of the file it is read from (128 MiB, or one row of an array whose rows are larger).

    Args:
        state: a tree of `jax.ShapeDtypeStruct` with shardings.
        only: the parts of the checkpoint that `state` holds ("parameters"); all of it unless told.

    Raises:
        InputError: an array is missing on either side, or its shape or format differs.
    """
    wanted = leaves_by_path(state)
    parts = set(only)
    stored = {
        array.path: array
        for array in found.manifest.arrays
        if not parts or array.path.partition("/")[0] in parts
    }
    _check_match(found, stored, wanted)
    arrays = [_restored(found.folder, stored[path], leaf) for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(state), arrays)


def check_match(found: Found, state: Tree) -> None:
    """Refuse a checkpoint whose arrays are not those of `state`, a tree of `jax.ShapeDtypeStruct`.

    Raises:
        InputError: an array is missing on either side, or its shape or format differs.
    """
    _check_match(found, {array.path: array for array in found.manifest.arrays}, leaves_by_path(state))


def whole_array(folder: Path, array: StoredArray) -> np.ndarray:
    """One array in host memory, whatever pieces it lies in."""
    return _box(folder, array, ((0,) * len(array.shape), array.shape))


def _check_match(found: Found, stored: dict[str, StoredArray], wanted: dict[str, Any]) -> None:
    def described(paths: set[str]) -> str:
        first = sorted(paths)[:3]
        return ", ".join(first) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")

    where = f"the checkpoint of step {found.step} in {found.folder.parent}"
    hint = "resume with the config the run was begun with: its config.json"
    if absent := wanted.keys() - stored.keys():
        raise InputError(f"{where} has no {described(absent)}, which this config's state has", hint=hint)
    if unknown := stored.keys() - wanted.keys():
        raise InputError(f"{where} has {described(unknown)}, which this config's state has not", hint=hint)
    for path, leaf in wanted.items():
        ours, theirs = (leaf.dtype.name, leaf.shape), (stored[path].dtype, stored[path].shape)
        if ours != theirs:
            words = [f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in (theirs, ours)]
            raise InputError(f"{where} has {path} as {words[0]}, and this config as {words[1]}", hint=hint)


def _restored(folder: Path, array: StoredArray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = wanted.sharding
    assert sharding is not None, f"{array.path} has no sharding"
    devices: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        devices.setdefault(box_of(index or (), array.shape), []).append(device)
    shards: list[jax.Array] = []
    for box, holders in devices.items():
        values = _box(folder, array, box)
        for device in holders:
            place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(values, place).block_until_ready())
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _box(folder: Path, array: StoredArray, box: Box) -> np.ndarray:
    start, extent = box
    values = _empty(extent, jnp.dtype(array.dtype))
    num_filled = sum(_fill(values, start, folder, piece) for piece in array.pieces)
    assert num_filled == values.size, f"{array.path}: {num_filled} of {values.size} elements are stored"
    return values


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Memory that begins half a vector off. jax would take other memory over as the device's own on a CPU,
    and could then not donate it: the first step would hold the state twice."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(num_bytes + VECTOR_BYTES, np.uint8)
    begin = (VECTOR_BYTES // 2 - memory.ctypes.data) % VECTOR_BYTES
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def _fill(values: np.ndarray, start: tuple[int, ...], folder: Path, piece: Piece) -> int:
    """Copy what `piece` holds of the box that begins at `start` into it; how many elements that were."""
    lows = [max(a, b) for a, b in zip(start, piece.start, strict=True)]
    highs = [
        min(a + n, b + m) for a, n, b, m in zip(start, values.shape, piece.start, piece.shape, strict=True)
    ]
    if any(high <= low for low, high in zip(lows, highs, strict=True)):
        return 0
    source = np.memmap(
        folder / piece.file, values.dtype, mode="r", offset=piece.offset_bytes, shape=piece.shape
    )
    part = values[_slices(lows, highs, start)]
    part[...] = source[_slices(lows, highs, piece.start)]
    return part.size


def _slices(lows: list[int], highs: list[int], start: tuple[int, ...]) -> tuple[slice | Any, ...]:
    """The box in coordinates that begin at `start`; an ellipsis keeps a scalar an array."""
    return (*(slice(low - at, high - at) for low, high, at in zip(lows, highs, start, strict=True)), ...)
