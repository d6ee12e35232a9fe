"""Read and verify the manifest of a checkpoint.

The manifest records which arrays are stored at which place in which files, and each file's size and hash. A
folder may come from a stranger, with a matching hash, so every field is checked before it is used.

A checkpoint's folder holds the files of arrays, `manifest.json`, and `manifest.json.sha256`, the manifest's
own hash as `sha256sum` writes it. These two are written last, in this order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes  # a dependency of jax, which takes its formats from it
import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.json.sha256"
FORMAT = 1
READ_BYTES = 1 << 22  # per read; hashing lets other threads run


STRICT = ConfigDict(extra="forbid", strict=True)
MOST_DIMS = 32
MOST_ELEMENTS = 2**56  # numpy counts bytes in 63 bits
Count = Annotated[int, Field(ge=0, lt=MOST_ELEMENTS)]  # of bytes or elements
Text = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Damaged(Exception):
    """The error for a checkpoint that is not what was written; its text names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint, in its folder."""

    __pydantic_config__ = STRICT
    name: Text
    num_bytes: Count
    sha256: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of an array.

    Records its start in the array, its shape, and the place of its bytes, which are in C order.
    """

    __pydantic_config__ = STRICT
    start: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: str
    offset_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array of the state: its path ("parameters/head"), and the pieces that form it.

    `dtype` is numpy's name, "bfloat16" and the fp8 formats included.
    """

    __pydantic_config__ = STRICT
    path: Text
    shape: Annotated[tuple[Count, ...], Field(max_length=MOST_DIMS)]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a complete checkpoint.

    `about`: JSON data that this package does not interpret.
    """

    __pydantic_config__ = STRICT
    step: Count
    about: dict[str, Any]
    arrays: tuple[StoredArray, ...]
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of arrays."""
        return sum(file.num_bytes for file in self.files)

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written(Manifest):
    """A manifest with its format number, as `manifest.json` holds it."""

    format: int


def hash_line(manifest: bytes) -> bytes:
    """Return the contents of `manifest.json.sha256`, which `sha256sum --check` reads."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def verified(folder: Path, step: int) -> Manifest:
    """Return the manifest of a checkpoint after reading every file and checking its hash.

    Raises:
        Damaged: as in `examined`; or a file was altered.
    """
    manifest = examined(folder, step)
    with _reading(), ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda file: _check_file(folder, file), manifest.files):
            pass
    return manifest


def examined(folder: Path, step: int) -> Manifest:
    """Return the manifest of a checkpoint whose files exist with the right sizes; do not read the files.

    Raises:
        Damaged: a file is missing, cut short, unknown or unreadable, or the manifest is not valid.
    """
    with _reading():
        manifest = _manifest(folder)
        if manifest.step != step:
            raise Damaged(f"{MANIFEST} is of step {manifest.step}")
        _check_names(folder, manifest)
    _check_arrays(manifest)
    return manifest


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Turn errors of the disk into `Damaged`."""
    try:
        yield
    except OSError as refused:
        name = Path(str(refused.filename)).name if refused.filename else "a file"
        raise Damaged(f"{name} cannot be read: {refused.strerror}") from refused


def _manifest(folder: Path) -> Manifest:
    for name in (MANIFEST, MANIFEST_HASH):
        path = folder / name
        if not os.path.lexists(path):
            raise Damaged(f"{name} is missing")
        if not (path.is_dir() or stat.S_ISREG(path.lstat().st_mode)):
            raise Damaged(f"{name} is no file")
    text = (folder / MANIFEST).read_bytes()
    if (folder / MANIFEST_HASH).read_bytes() != hash_line(text):
        raise Damaged(f"{MANIFEST} or {MANIFEST_HASH} was altered: the one is not the hash of the other")
    return manifest_of(text)


def manifest_of(text: bytes) -> Manifest:
    """Parse the text that `to_json` returned.

    The types of its fields are checked. Their statements about files are not.

    Raises:
        Damaged: another version of Meshwright wrote it, or another program.
    """
    try:
        written = _reader().validate_json(text)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
        where = repr(".".join(map(str, first["loc"])) or "the whole")[1:-1]  # a key may hold any characters
        raise Damaged(f"{MANIFEST} is not as Meshwright writes it: {where}: {first['msg']}") from wrong
    if written.format != FORMAT:
        raise Damaged(f"{MANIFEST} has format {written.format}, and this Meshwright reads {FORMAT}")
    return Manifest(step=written.step, about=written.about, arrays=written.arrays, files=written.files)


@cache
def _reader() -> TypeAdapter[_Written]:
    return TypeAdapter(_Written)


def _check_names(folder: Path, manifest: Manifest) -> None:
    """Raise if a file is missing, unknown or of the wrong size, before any large file is read."""
    there = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    expected = {file.name: file.num_bytes for file in manifest.files}
    for name, num_bytes in expected.items():
        if name not in there:
            raise Damaged(f"{name} is missing")
        if not stat.S_ISREG(there[name].st_mode):
            raise Damaged(f"{name} is no file")
        if there[name].st_size != num_bytes:
            raise Damaged(f"{name} has {there[name].st_size:,} bytes of {num_bytes:,}")
    unknown = sorted(there.keys() - expected.keys() - {MANIFEST, MANIFEST_HASH})
    if unknown:
        raise Damaged(f"{unknown[0]} is not in {MANIFEST}")


def _check_file(folder: Path, file: StoredFile) -> None:
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    with (folder / file.name).open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    if digest.hexdigest() != file.sha256:
        raise Damaged(f"{file.name} was altered: its hash is not the manifest's")


def _check_arrays(manifest: Manifest) -> None:
    """Raise unless the pieces of every array are within the files and hold each element once."""
    sizes = {file.name: file.num_bytes for file in manifest.files}
    if len(sizes) < len(manifest.files):
        raise Damaged(f"{MANIFEST} names a file twice")
    if len({array.path for array in manifest.arrays}) < len(manifest.arrays):
        raise Damaged(f"{MANIFEST} names an array twice")
    for array in manifest.arrays:
        element_bytes = _element_bytes(array)
        if math.prod(max(size, 1) for size in array.shape) >= MOST_ELEMENTS:
            raise Damaged(f"{MANIFEST}: {array.path!r} has the shape {array.shape}, larger than any array")
        for piece in array.pieces:
            _check_piece(array, piece, element_bytes, sizes)
        if not _is_covered(array):
            raise Damaged(f"{MANIFEST}: the pieces of {array.path!r} do not make it up, each element once")


def _element_bytes(array: StoredArray) -> int:
    """Return the size of an element in bytes; raise if the format is not one of numbers.

    numpy's other formats, such as objects and texts, cannot belong to a state.
    """
    try:
        dtype = np.dtype(getattr(ml_dtypes, array.dtype, array.dtype))  # bfloat16 and the 8-bit formats
    except TypeError as unknown:
        raise Damaged(f"{MANIFEST}: {array.path!r} is of {array.dtype!r}, which is no format") from unknown
    is_number = dtype.kind in "biufc" or hasattr(ml_dtypes, array.dtype)
    if dtype.name != array.dtype or not is_number:
        raise Damaged(f"{MANIFEST}: {array.path!r} is of {array.dtype!r}, which is no format of numbers")
    return dtype.itemsize


def _check_piece(array: StoredArray, piece: Piece, element_bytes: int, sizes: dict[str, int]) -> None:
    where = f"{MANIFEST}: a piece of {array.path!r}"
    if piece.file not in sizes:
        raise Damaged(f"{where} names {piece.file!r}, which is no file of the checkpoint")
    end = piece.offset_bytes + math.prod(piece.shape) * element_bytes
    if end > sizes[piece.file]:
        raise Damaged(f"{where} ends at byte {end:,} of {piece.file!r}, which has {sizes[piece.file]:,}")
    if not len(piece.start) == len(piece.shape) == len(array.shape):
        raise Damaged(f"{where} has other dimensions than the array")
    if any(at + n > m for at, n, m in zip(piece.start, piece.shape, array.shape, strict=True)):
        raise Damaged(f"{where} reaches beyond the array's shape {array.shape}")


def _is_covered(array: StoredArray) -> bool:
    """Return whether the pieces hold each element once.

    This is so if they hold as many elements as the array, and no two of them overlap.
    """
    pieces = [piece for piece in array.pieces if math.prod(piece.shape)]
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(array.shape):
        return False
    lows = np.array([piece.start for piece in pieces], np.int64).reshape(len(pieces), len(array.shape))
    highs = lows + np.array([piece.shape for piece in pieces], np.int64).reshape(lows.shape)
    return not any(
        np.all((lows[at] < highs[at + 1 :]) & (lows[at + 1 :] < highs[at]), axis=1).any()
        for at in range(len(pieces))
    )
