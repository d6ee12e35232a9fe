"""Write, hash and sync the files of a checkpoint in one pass."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ._manifest import (
    MANIFEST,
    MANIFEST_HASH,
    Manifest,
    Piece,
    StoredArray,
    StoredFile,
    hash_line,
    manifest_of,
)

if TYPE_CHECKING:
    from ._restore import HostArray

PART = "part-{}.json"  # the manifest of one process's files, until the first process has read it
FILE_BYTES = 1 << 27  # approximate size of a file: several are hashed, written and synced at once
WRITE_BYTES = 1 << 22  # per write
ALIGNMENT = 64  # of each piece in its file, so that it can be mapped as an array of any format


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A piece of an array, its place in a file, and its data."""

    path: str
    piece: Piece
    data: np.ndarray


def write_part(folder: Path, step: int, arrays: Sequence[HostArray], process: int) -> Manifest:
    """Write the shards of one process into the checkpoint's folder, and return their manifest.

    Each array is read once: it is hashed while it is written.

    Raises:
        OSError: the disk is full or missing.
    """
    plan = _plan(arrays, process)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        files = list(pool.map(lambda item: _write_file(folder / item[0], item[1]), plan.items()))
    placed = [each for pieces in plan.values() for each in pieces]
    stored = [
        StoredArray(
            path=array.path,
            shape=array.shape,
            dtype=array.dtype,
            pieces=tuple(each.piece for each in placed if each.path == array.path),
        )
        for array in arrays
    ]
    return Manifest(step=step, about={}, arrays=tuple(stored), files=tuple(files))


def leave_part(folder: Path, part: Manifest, process: int) -> None:
    """Write the manifest of this process's files into the folder, for the first process to read.

    Raises:
        OSError: the disk is full or missing.
    """
    _write_bytes(folder / PART.format(process), part.to_json().encode())
    sync_folder(folder)


def take_part(folder: Path, process: int) -> Manifest:
    """Read and delete the manifest that a process has left; a complete checkpoint contains no such file.

    Raises:
        OSError: the file is missing: the processes do not see the same folder.
        Damaged: it is not a valid manifest.
    """
    path = folder / PART.format(process)
    part = manifest_of(path.read_bytes())
    path.unlink()
    return part


def write_manifest(folder: Path, parts: Sequence[Manifest], about: Mapping[str, Any]) -> Manifest:
    """Combine the files of all processes into a checkpoint: write its manifest, and then the manifest's hash.

    Raises:
        OSError: the disk is full or missing.
    """
    arrays = tuple(
        dataclasses.replace(array, pieces=tuple(piece for part in parts for piece in part.arrays[at].pieces))
        for at, array in enumerate(parts[0].arrays)
    )
    files = tuple(file for part in parts for file in part.files)
    manifest = Manifest(step=parts[0].step, about=dict(about), arrays=arrays, files=files)
    text = manifest.to_json().encode()
    _write_bytes(folder / MANIFEST, text)
    _write_bytes(folder / MANIFEST_HASH, hash_line(text))
    sync_folder(folder)
    return manifest


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _plan(arrays: Sequence[HostArray], process: int) -> dict[str, list[_Placed]]:
    """Assign the pieces to files, in order.

    The first number in a file's name is the process's.
    """
    plan: dict[str, list[_Placed]] = {}
    offset = FILE_BYTES
    name = ""
    for array in arrays:
        for start, data in _parts(array):
            if offset >= FILE_BYTES:
                name, offset = f"arrays-{process}-{len(plan):05d}.bin", 0
                plan[name] = []
            piece = Piece(start=start, shape=data.shape, file=name, offset_bytes=offset)
            plan[name].append(_Placed(path=array.path, piece=piece, data=data))
            offset += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
    return plan


def _parts(array: HostArray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield the array's pieces, with large ones cut along their first dimension.

    Each part is at most about as large as a file.
    """
    for start, data in zip(array.starts, array.pieces, strict=True):
        if not data.ndim or data.nbytes <= FILE_BYTES:
            yield start, data
            continue
        rows = max(1, FILE_BYTES * len(data) // data.nbytes)
        for row in range(0, len(data), rows):
            yield (start[0] + row, *start[1:]), data[row : row + rows]


def _write_file(path: Path, pieces: Sequence[_Placed]) -> StoredFile:
    digest, position = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for each in pieces:
            padding = bytes(each.piece.offset_bytes - position)
            for data in (memoryview(padding), bytes_of(each.data)):
                for begin in range(0, len(data), WRITE_BYTES):
                    part = data[begin : begin + WRITE_BYTES]
                    digest.update(part)
                    write_all(file, part)
            position = each.piece.offset_bytes + each.data.nbytes
        os.fsync(file.fileno())
    return StoredFile(name=path.name, num_bytes=position, sha256=digest.hexdigest())


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the array's bytes in C order, without a copy.

    numpy's own buffer does not support the formats of jax.
    """
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _write_bytes(path: Path, text: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        write_all(file, memoryview(text))
        os.fsync(file.fileno())


def write_all(file: Any, data: memoryview) -> None:
    """Write all of `data` to an unbuffered file.

    One write takes only what fits. The next write of the rest then raises with the reason.
    """
    while len(data):
        data = data[file.write(data) :]
