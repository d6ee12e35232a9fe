"""Copy the arrays of a state between devices and checkpoints.

`copy_off` copies the state off the devices, the only part of a save that a step waits for. `write_shards`
writes the copies with TensorStore, in the format of Orbax: one OCDBT database of Zarr arrays, without
compression, and a JSON file that describes the tree. `restore` places the arrays of a checkpoint on a mesh,
whatever mesh they came from. The layers of a pipeline in several chunks, [chunks, layers / chunks, ...], are
stored as those of any other run, [layers, ...], and without those that pad its stages. `export_parameters`
writes the parameters to a safetensors file.

Sources: https://orbax.readthedocs.io, "Checkpoint Format"; https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshwright.errors import InputError, MeshwrightError
from meshwright.extras import not_installed
from meshwright.sharding import num_chunks_of, shape_of_layers

from ._folder import Found, path_for_arrays
from ._manifest import STATE, Piece, StoredArray

try:
    import tensorstore as ts
except ModuleNotFoundError as missing:
    raise not_installed("train", ["tensorstore"], "a checkpoint") from missing

Tree = Any
Box = tuple[tuple[int, ...], tuple[int, ...]]  # its start in the array, and its shape

PROCESS_STATE = "ocdbt.process_{}"  # the database of a process other than the first, as Orbax names it
CHUNK_BYTES = 1 << 25  # at most, where an array can be divided so; whoever reads a box reads whole chunks
CACHE_BYTES = 1 << 27  # of chunks while restoring: boxes of several devices may lie in one
FILE_BYTES = 1 << 27  # approximate size of a file: several are written at once
HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
PARTS_OF_MOMENTS = ("codes", "scales")  # of moments in eight bits
SEQUENCE_KEY, DICT_KEY = 1, 2  # Orbax's kinds of tree nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostArray:
    """An array of the state in host memory: its place in the tree, full shape, and pieces, each in C order.

    `keys`: the names and the indices on the way to it. `chunk_shape`: of the boxes in which it is stored.
    """

    keys: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    pieces: tuple[np.ndarray, ...]

    @property
    def path(self) -> str:
        """The keys with slashes between them: "optimizer/0/mu/head"."""
        return "/".join(map(str, self.keys))

    @property
    def num_chunks(self) -> int:
        """The number of boxes in which all processes together store the array."""
        return math.prod(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))


def leaves_by_path(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by path: "parameters/blocks/norm", "optimizer/0/mu/head"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state have one path"
    return named


def _keys(path: tuple[Any, ...]) -> tuple[str | int, ...]:
    is_index = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
    return tuple(
        int(name) if isinstance(key, is_index) else name
        for key in path
        for name in [jax.tree_util.keystr((key,), simple=True)]
    )


def _parameter_name(keys: Sequence[str | int]) -> str:
    """Return the last name on an array's path that is not of a part of a moment in eight bits."""
    return next(str(key) for key in reversed(keys) if key not in PARTS_OF_MOMENTS)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Convert a shard's index in an array of `shape` to its start and extent by dimension."""
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges)


def chunk_shape_of(shape: tuple[int, ...], shard: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Return the shape of the boxes in which an array is stored.

    A shard is halved along its longest dimension until a box has at most `CHUNK_BYTES`. Boxes divide the
    shards, so that no two processes write to the same one; where that is impossible they stay larger.
    """
    chunk = [max(size, 1) for size in shard]
    while math.prod(chunk) * element_bytes > CHUNK_BYTES:
        can_halve = [at for at, n in enumerate(chunk) if n % 2 == 0 or (n > 1 and shard[at] == shape[at])]
        if not can_halve:
            break
        longest = max(can_halve, key=lambda at: chunk[at])
        chunk[longest] = -(-chunk[longest] // 2)
    return tuple(chunk)


def copy_off(state: Tree, num_layers: int | None = None) -> list[HostArray]:
    """Return a copy of the state in host memory, which stays valid when the state is donated or deleted.

    If several devices hold the same shard, one process copies it once.

    Args:
        num_layers: of the model, beyond which stacked layers are a pipeline's padding and are left out.
    """
    arrays = jax.tree_util.tree_flatten_with_path(state)[0]
    shards = [[shard for shard in array.addressable_shards if shard.replica_id == 0] for _, array in arrays]
    every = [shard.data for own in shards for shard in own]
    for data in every:
        data.copy_to_host_async()  # starts all copies before it waits for one
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        copies = iter(list(pool.map(_copied, every)))
    return [
        _host_array(path, array, [(shard.index, next(copies)) for shard in own], num_layers)
        for (path, array), own in zip(arrays, shards, strict=True)
    ]


def _host_array(
    path: tuple[Any, ...],
    array: jax.Array,
    shards: Sequence[tuple[tuple[slice, ...], np.ndarray]],
    num_layers: int | None,
) -> HostArray:
    """Return an array's shards as its pieces, those of a pipeline's chunks apart and without its padding."""
    keys = _keys(path)
    shape, num_chunks = shape_of_layers(array, num_layers, _parameter_name(keys)), num_chunks_of(array)
    shard_shape = array.sharding.shard_shape(array.shape)
    starts: list[tuple[int, ...]] = []
    pieces: list[np.ndarray] = []
    for index, values in shards:
        start = box_of(index, array.shape)[0]
        for chunk, piece in enumerate(values if num_chunks > 1 else [values]):
            at = (chunk * array.shape[1] + start[1], *start[2:]) if num_chunks > 1 else start
            if not shape or at[0] < shape[0] or not piece.size:
                starts.append(at)
                pieces.append(piece[: shape[0] - at[0]] if shape else piece)
    return HostArray(
        keys=keys,
        shape=shape,
        dtype=array.dtype.name,
        chunk_shape=chunk_shape_of(
            shape, shard_shape[1:] if num_chunks > 1 else shard_shape, array.dtype.itemsize
        ),
        starts=tuple(starts),
        pieces=tuple(pieces),
    )


def _copied(data: jax.Array) -> np.ndarray:
    """Return a shard as a numpy array that does not share its buffer.

    If the shard is in host memory, numpy would return a view of its buffer, which could then not be donated,
    so the shard is copied. Elsewhere the transfer has already made a copy, which is returned as it is.
    """
    device = next(iter(data.devices()))
    in_host_memory = device.platform == "cpu" or "host" in str(data.sharding.memory_kind)
    return np.array(data, order="C") if in_host_memory else np.asarray(data, order="C")


def write_shards(folder: Path, arrays: Sequence[HostArray], process: int) -> Path:
    """Write the pieces that this process holds into the checkpoint's folder; return the folder of its files.

    They are written without another copy of them in memory.

    Raises:
        OSError: the disk is full or missing.
    """
    state = folder / STATE
    own = state / PROCESS_STATE.format(process) if process else state
    own.mkdir(parents=True, exist_ok=True)  # another process may have made the folder around it
    own_arrays = [array for array in arrays if array.pieces or not process]
    one_database = ts.Context()  # for all arrays, and not one for each
    with _disk_errors(), ts.Transaction() as transaction:
        opening = [
            ts.open(_new_array(own, array), create=True, context=one_database, transaction=transaction)
            for array in own_arrays
        ]
        writing = [
            stored.result()[_slices(at, piece.shape)].write(
                piece, can_reference_source_data_indefinitely=True
            )
            for array, stored in zip(own_arrays, opening, strict=True)
            for at, piece in zip(array.starts, array.pieces, strict=True)
        ]
        for written in writing:
            written.copy.result()
    if not process:
        _describe_tree(folder, arrays)
    return own


def merge_processes(folder: Path, num_processes: int, arrays: Sequence[HostArray]) -> None:
    """Add what the other processes have written to the first one's database, which refers to their files.

    Raises:
        OSError: the disk is full or missing, or does not hold all chunks of `arrays`.
    """
    state, one_context = folder / STATE, ts.Context()  # one, or TensorStore cannot copy by reference
    with _disk_errors():
        whole = ts.KvStore.open(_database(state), context=one_context).result()
        with ts.Transaction() as transaction:
            for process in range(1, num_processes):
                part = _database(state / PROCESS_STATE.format(process))
                opened = ts.KvStore.open(part, context=one_context).result()
                opened.experimental_copy_range_to(whole.with_transaction(transaction)).result()
        held, needed = len(whole.list().result()), sum(1 + array.num_chunks for array in arrays)
    if held != needed:
        raise OSError(f"{state} holds {held} of {needed} entries: the processes do not see the same folder")


def check_written(folder: Path, arrays: Sequence[StoredArray]) -> None:
    """Open every array of a checkpoint from its files, as `restore` does, before it is called saved.

    Raises:
        OSError: an array is not there, or has another shape or format.
    """
    context = ts.Context()  # one of its own, so that nothing comes from the memory of the writer
    opening = [(array, _open(folder, array, context)) for array in arrays]
    for array, opened in opening:
        try:
            opened.result()
        except ValueError as wrong:
            raise OSError(f"{array.path} cannot be read back: {_reason(wrong)}") from wrong


def _open(folder: Path, array: StoredArray, context: ts.Context) -> ts.Future[ts.TensorStore]:
    """Begin to open an array of a checkpoint's folder for reading, with the shape and format it must have."""
    spec = _stored_array(folder / STATE, array.path) | {"fill_missing_data_reads": False}
    dtype, shape = ts.dtype(array.dtype), array.shape
    return ts.open(spec, open=True, read=True, context=context, dtype=dtype, shape=shape)


def _reason(wrong: ValueError) -> str:
    """Return TensorStore's words without the long specification that it appends."""
    return str(wrong).split(" [tensorstore_spec=")[0]


def _describe_tree(folder: Path, arrays: Sequence[HostArray]) -> None:
    """Write the tree's description for Orbax, with numpy arrays, which fit any device."""
    tree: dict[str, Any] = {}
    for array in arrays:
        kinds = [SEQUENCE_KEY if isinstance(key, int) else DICT_KEY for key in array.keys]
        names = tuple(map(str, array.keys))
        value = {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": array.shape}
        keys = [{"key": name, "key_type": kind} for name, kind in zip(names, kinds, strict=True)]
        tree[str(names)] = {"key_metadata": keys, "value_metadata": value}
    described = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True, "custom_metadata": None}
    described |= {"store_array_data_equal_to_fill_value": True}
    (folder / STATE / "_METADATA").write_text(json.dumps(described))
    now = time.time_ns()
    about = {"item_handlers": {STATE: HANDLER}, "metrics": {}, "performance_metrics": {}}
    about |= {"init_timestamp_nsecs": now, "commit_timestamp_nsecs": now, "custom_metadata": {}}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(about))


def _database(folder: Path) -> dict[str, Any]:
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "compression": None}
    base = {"driver": "file", "path": f"{path_for_arrays(folder)}/"}
    return {"driver": "ocdbt", "base": base, "config": config, "target_data_file_size": FILE_BYTES}


def _stored_array(folder: Path, path: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {**_database(folder), "path": f"{path.replace('/', '.')}/"}}


def _new_array(folder: Path, array: HostArray) -> dict[str, Any]:
    codec: dict[str, Any] = {"name": "bytes"}
    if jnp.dtype(array.dtype).itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    return {
        **_stored_array(folder, array.path),
        "metadata": {
            "shape": array.shape,
            "data_type": array.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk_shape}},
            "codecs": [codec],
        },
        "store_data_equal_to_fill_value": True,  # a chunk that is not there is damage, and not zeros
    }


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn TensorStore's errors of the disk into `OSError`."""
    try:
        yield
    except ValueError as refused:
        code = re.search(r"\[os_error_code='(\d+)'", str(refused))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from refused


VECTOR_BYTES = 64  # jax's CPU devices use host memory without a copy if it begins at a multiple of this


def restore(found: Found, state: Tree, *, only: Iterable[str] = (), num_layers: int | None = None) -> Tree:
    """Restore the arrays of a checkpoint, laid out as `state` specifies.

    Shapes and formats must be the checkpoint's. Each device receives only its own shards, and nothing else is
    allocated on it. Host memory: at most three shards, the chunks that are being read, and 128 MiB of chunks
    that were read before.

    Args:
        state: a tree of `jax.ShapeDtypeStruct` with shardings.
        only: the parts of the checkpoint that `state` holds ("parameters"); by default all of them.
        num_layers: of the model, beyond which stacked layers are a pipeline's padding and become zeros.

    Raises:
        InputError: an array is missing on either side, or its shape or format differs.
        MeshwrightError: an array cannot be read.
    """
    wanted = leaves_by_path(state)
    parts = set(only)
    stored = {
        array.path: array
        for array in found.manifest.arrays
        if not parts or array.path.partition("/")[0] in parts
    }
    _check_match(found, stored, wanted, num_layers)
    read = _Reader(found)
    arrays = [_restored(read, stored[path], leaf) for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(state), arrays)


def check_match(found: Found, state: Tree, num_layers: int | None = None) -> None:
    """Raise if a checkpoint's arrays are not those of `state`, a tree of `jax.ShapeDtypeStruct`.

    `num_layers` as for `restore`.

    Raises:
        InputError: an array is missing on either side, or its shape or format differs.
    """
    stored = {array.path: array for array in found.manifest.arrays}
    _check_match(found, stored, leaves_by_path(state), num_layers)


def whole_array(found: Found, array: StoredArray) -> np.ndarray:
    """Return one array in host memory.

    Raises:
        MeshwrightError: it cannot be read.
    """
    return _Reader(found).box(array, ((0,) * len(array.shape), array.shape))


def _check_match(
    found: Found, stored: dict[str, StoredArray], wanted: dict[str, Any], num_layers: int | None
) -> None:
    def described(paths: set[str]) -> str:
        first = sorted(paths)[:3]
        return ", ".join(first) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")

    where = found.words
    hint = "resume with the config the run was begun with: its config.json"
    if absent := wanted.keys() - stored.keys():
        raise InputError(f"{where} has no {described(absent)}, which this config's state has", hint=hint)
    if unknown := stored.keys() - wanted.keys():
        raise InputError(
            f"{where} has {described(unknown)}, which this config's state does not have", hint=hint
        )
    for path, leaf in wanted.items():
        ours, theirs = (
            (leaf.dtype.name, shape_of_layers(leaf, num_layers, _parameter_name(path.split("/")))),
            (stored[path].dtype, stored[path].shape),
        )
        if ours != theirs:
            words = [f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in (theirs, ours)]
            raise InputError(f"{where} has {path} as {words[0]}, and this config as {words[1]}", hint=hint)


def _restored(read: _Reader, array: StoredArray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = wanted.sharding
    assert sharding is not None, f"{array.path} has no sharding"
    devices: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(wanted.shape).items():
        devices.setdefault(box_of(index or (), wanted.shape), []).append(device)
    shards: list[jax.Array] = []
    for box, holders in devices.items():
        values = _read_layers(read, array, wanted, box)
        for device in holders:
            place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(values, place).block_until_ready())
    return jax.make_array_from_single_device_arrays(wanted.shape, sharding, shards)


def _read_layers(read: _Reader, array: StoredArray, wanted: jax.ShapeDtypeStruct, box: Box) -> np.ndarray:
    """Read a box of an array, which may be one of a pipeline's layers: in chunks, with padding."""
    if num_chunks_of(wanted) == 1 and wanted.shape == array.shape:
        return read.box(array, box)
    (starts, extents), num_chunks = box, num_chunks_of(wanted)
    values = empty_unaligned(extents, jnp.dtype(array.dtype))
    values[...] = 0
    for chunk in range(num_chunks):
        (first, *start), (count, *extent) = (starts[1:], extents[1:]) if num_chunks > 1 else box
        first += chunk * wanted.shape[1] if num_chunks > 1 else 0
        held = min(count, array.shape[0] - first)
        if held > 0:
            part = read.box(array, ((first, *start), (held, *extent)))
            (values[chunk] if num_chunks > 1 else values)[:held] = part
    return values


class _Reader:
    """Read boxes of the arrays of a checkpoint, of either format."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})

    def box(self, array: StoredArray, box: Box) -> np.ndarray:
        """Return the elements of a box.

        Raises:
            MeshwrightError: the files do not hold them.
        """
        try:
            if array.pieces is None:
                opened = _open(self._found.folder, array, self._context).result()
                read = opened[_slices(*box)].read().result()
                values = empty_unaligned(box[1], read.dtype)
                values[...] = read
                return values
            return self._gather(array, array.pieces, box)
        except ValueError as wrong:
            raise MeshwrightError(
                f"{array.path} cannot be read from {self._found.words}: {_reason(wrong)}",
                hint="move this checkpoint away, to go on from the one before it",
            ) from wrong

    def _gather(self, array: StoredArray, pieces: Sequence[Piece], box: Box) -> np.ndarray:
        """Read a box from the pieces of format 1."""
        names = {file.name for file in self._found.manifest.files}
        values = empty_unaligned(box[1], jnp.dtype(array.dtype))
        is_filled = np.zeros(box[1], bool)
        for piece in pieces:
            if piece.file not in names:
                raise ValueError(f"a piece of it names {piece.file!r}, which is not a file of the checkpoint")
            lows = [max(a, b) for a, b in zip(box[0], piece.start, strict=True)]
            ends = zip(box[0], box[1], piece.start, piece.shape, strict=True)
            shared = [min(a + n, b + m) - low for (a, n, b, m), low in zip(ends, lows, strict=True)]
            if any(size <= 0 for size in shared):
                continue
            path, place = self._found.folder / piece.file, piece.offset_bytes
            stored = np.memmap(path, values.dtype, mode="r", offset=place, shape=piece.shape)
            at = _slices(np.subtract(lows, box[0]).tolist(), shared)
            values[at] = stored[_slices(np.subtract(lows, piece.start).tolist(), shared)]
            is_filled[at] = True
        if not is_filled.all():
            raise ValueError("its pieces do not make it up")
        return values


def empty_unaligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return uninitialised memory that begins half a vector past an aligned address.

    On a CPU, jax would use aligned memory as the device's own, and could then not donate it. The first step
    would hold the state twice.
    """
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(num_bytes + VECTOR_BYTES, np.uint8)
    begin = (VECTOR_BYTES // 2 - memory.ctypes.data) % VECTOR_BYTES
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def _slices(start: Sequence[int], extent: Sequence[int]) -> tuple[slice | Any, ...]:
    """Return a box as an index; its ellipsis keeps a scalar an array."""
    return (*(slice(at, at + size) for at, size in zip(start, extent, strict=True)), ...)


PARAMETERS = "parameters/"
FORMATS = {  # names of numpy and of safetensors
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bool": "BOOL"},
    **{f"{kind}int{bits}": f"{kind or 'i'}{bits}".upper() for kind in ("", "u") for bits in (8, 16, 32, 64)},
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
        array.path.removeprefix(PARAMETERS).replace("/", "."): array
        for array in sorted(found.manifest.arrays, key=lambda array: array.path)
        if array.path.startswith(PARAMETERS)
    }
    for name, array in arrays.items():
        if array.dtype not in FORMATS:
            raise InputError(
                f"{name} is of {array.dtype}, which a safetensors file cannot hold",
                hint=f"train with parameters of one of {', '.join(FORMATS)}",
            )
    if not path.name:
        raise InputError(
            f"{str(path)!r} does not name a file", hint="name a file, as in parameters.safetensors"
        )
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
            flat: Any = whole_array(found, array).reshape(-1).view(np.uint8)
            file.write(memoryview(flat))  # numpy's own buffer does not support the formats of jax
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
