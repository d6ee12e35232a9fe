"""Copy arrays between devices and checkpoint files.

`copy_off` copies the state off the devices, the only part of a save that a step waits for. `restore` places a
checkpoint's arrays on a mesh, whatever mesh they came from. `export_parameters` writes the parameters to a
safetensors file: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..errors import InputError
from ._manifest import Piece, StoredArray
from ._records import Found
from ._write import bytes_of

Tree = Any
Box = tuple[tuple[int, ...], tuple[int, ...]]  # its start in the array, and its shape


@dataclass(frozen=True, slots=True, kw_only=True)
class HostArray:
    """An array of the state in host memory: its path, full shape, and pieces of it, each in C order."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    starts: tuple[tuple[int, ...], ...]
    pieces: tuple[np.ndarray, ...]


def leaves_by_path(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by path: "parameters/blocks/norm", "optimizer/0/mu/head"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state have one path"
    return named


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Convert a shard's index in an array of `shape` to its start and extent by dimension."""
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges)


def host_copy_bytes(state: Tree) -> int:
    """Return the additional host memory that a save takes: one copy of what this process holds.

    `state` may be abstract, with shardings. Each element counts once, however many devices hold it. With
    several processes this is an upper bound, because a shard that several of them hold is copied by only one.
    Not counted: a file's buffer and the manifest, below 10 MB.
    """
    total = 0
    for leaf in jax.tree.leaves(state):
        index_map = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        boxes = {box_of(index, leaf.shape) for index in index_map.values()}
        total += sum(math.prod(extent) for _, extent in boxes) * leaf.dtype.itemsize
    return total


def copy_off(state: Tree) -> list[HostArray]:
    """Return a copy of the state in host memory, which stays valid when the state is donated or deleted.

    If several devices hold the same shard, one process copies it once.
    """
    arrays = leaves_by_path(state)
    shards = {path: _own_shards(array) for path, array in arrays.items()}
    every = [shard.data for own in shards.values() for shard in own]
    for data in every:
        data.copy_to_host_async()  # starts all copies before it waits for one
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        copies = iter(list(pool.map(_copied, every)))
    return [
        HostArray(
            path=path,
            shape=array.shape,
            dtype=array.dtype.name,
            starts=tuple(box_of(shard.index, array.shape)[0] for shard in shards[path]),
            pieces=tuple(next(copies) for _ in shards[path]),
        )
        for path, array in arrays.items()
    ]


def _own_shards(array: jax.Array) -> list[Any]:
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _copied(data: jax.Array) -> np.ndarray:
    """Return a shard as a numpy array that does not share its buffer.

    If the shard is in host memory, numpy would return a view of its buffer, which could then not be donated,
    so the shard is copied. Elsewhere the transfer has already made a copy, which is returned as it is.
    """
    device = next(iter(data.devices()))
    in_host_memory = device.platform == "cpu" or "host" in str(data.sharding.memory_kind)
    return np.array(data, order="C") if in_host_memory else np.asarray(data, order="C")


VECTOR_BYTES = 64  # jax's CPU devices use host memory without a copy if it begins at a multiple of this


def restore(found: Found, state: Tree, *, only: Iterable[str] = ()) -> Tree:
    """Restore the arrays of a checkpoint, laid out as `state` specifies.

    Shapes and formats must be the checkpoint's. Each device receives only its own shards, and nothing else is
    allocated on it. Host memory: at most two shards, and the pages of the file that is being read (128 MiB,
    or one row of an array whose rows are larger).

    Args:
        state: a tree of `jax.ShapeDtypeStruct` with shardings.
        only: the parts of the checkpoint that `state` holds ("parameters"); by default all of them.

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
    """Raise if a checkpoint's arrays are not those of `state`, a tree of `jax.ShapeDtypeStruct`.

    Raises:
        InputError: an array is missing on either side, or its shape or format differs.
    """
    _check_match(found, {array.path: array for array in found.manifest.arrays}, leaves_by_path(state))


def whole_array(folder: Path, array: StoredArray) -> np.ndarray:
    """Return one array in host memory, assembled from its pieces."""
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
    """Return uninitialised memory that begins half a vector past an aligned address.

    On a CPU, jax would use aligned memory as the device's own, and could then not donate it. The first step
    would hold the state twice.
    """
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(num_bytes + VECTOR_BYTES, np.uint8)
    begin = (VECTOR_BYTES // 2 - memory.ctypes.data) % VECTOR_BYTES
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def _fill(values: np.ndarray, start: tuple[int, ...], folder: Path, piece: Piece) -> int:
    """Copy the elements that `piece` and the box at `start` share into `values`; return their number."""
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
    """Return the box in coordinates relative to `start`; an ellipsis keeps a scalar an array."""
    return (*(slice(low - at, high - at) for low, high, at in zip(lows, highs, start, strict=True)), ...)


PART = "parameters"
FORMATS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "uint64": "U64",
    "int32": "I32",
    "uint32": "U32",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
ALIGNMENT = 8  # of the beginning of the data, as the format requires


def export_parameters(found: Found, path: Path) -> dict[str, StoredArray]:
    """Write a checkpoint's parameters to a safetensors file; return the arrays that it holds, by name.

    Names are the parameters' paths with dots: "blocks.attention.query". Values are as trained, and stacked
    layers stay one array. Host memory: the largest array. The file appears only when it is complete.

    Raises:
        InputError: the file cannot be written, or safetensors has no name for a parameter's format.
    """
    arrays = {
        array.path.removeprefix(f"{PART}/").replace("/", "."): array
        for array in sorted(found.manifest.arrays, key=lambda array: array.path)
        if array.path.startswith(f"{PART}/")
    }
    for name, array in arrays.items():
        if array.dtype not in FORMATS:
            raise InputError(
                f"{name} is of {array.dtype}, which a safetensors file cannot hold",
                hint=f"train with parameters of one of {', '.join(FORMATS)}",
            )
    if not path.name:
        raise InputError(f"{str(path)!r} names no file", hint="name a file, as in parameters.safetensors")
    partial = path.with_name(f".{path.name}.partial")
    try:
        try:
            _write(partial, found, arrays)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as refused:
        raise InputError(
            f"cannot write {path}: {refused.strerror}",
            hint="name a file in a folder that exists and has room",
        ) from refused
    return arrays


def _write(path: Path, found: Found, arrays: dict[str, StoredArray]) -> None:
    with path.open("wb") as file:
        file.write(_header(found, arrays))
        for array in arrays.values():
            file.write(bytes_of(whole_array(found.folder, array)))
        file.flush()
        os.fsync(file.fileno())


def _header(found: Found, arrays: dict[str, StoredArray]) -> bytes:
    """Return the header: its length in eight bytes, then JSON.

    The JSON states the name, format, shape and byte range of each array.
    """
    entries: dict[str, object] = {"__metadata__": {"producer": "meshwright", "step": str(found.step)}}
    begin = 0
    for name, array in arrays.items():
        end = begin + int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
        entries[name] = {
            "dtype": FORMATS[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
