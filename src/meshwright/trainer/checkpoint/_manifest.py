"""Write, read and verify the manifest of a checkpoint.

A checkpoint's folder holds:

* `state/` and `_CHECKPOINT_METADATA`: the arrays, as Orbax stores and reads them;
* `manifest.json`: the step, the data that was saved with the state, the format and shape of every array, and
  the size and SHA-256 of every file;
* `manifest.json.sha256`: the manifest's own hash, as `sha256sum` writes it.

The last two are written last, in this order. Format 1, of earlier releases, is only read: its arrays are
pieces in files `arrays-*.bin`, and the manifest has the place of each piece.

A folder may come from a stranger, with a matching hash. So the types of all fields are checked here, and what
they say of arrays is checked against the state, and the files, when an array is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from meshwright.errors import InputError
from meshwright.formats import format_of_dtype

MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.json.sha256"
STATE = "state"  # the folder of the arrays
DATABASE = f"{STATE}/manifest.ocdbt"  # the file through which TensorStore finds all of them
FORMAT, FORMAT_OF_PIECES = 2, 1
STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=0, lt=2**56)]  # of bytes or elements; numpy counts bytes in 63 bits
Text = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Damaged(Exception):
    """The error for a checkpoint that is not what was written; its text names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint; `name` is its path in the checkpoint's folder, with slashes."""

    __pydantic_config__ = STRICT
    name: Text
    num_bytes: Count
    sha256: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of an array in format 1: its start and shape, and the place of its bytes, in C order."""

    __pydantic_config__ = STRICT
    start: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: str
    offset_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array of the state, with its path: "parameters/head".

    `dtype` is numpy's name, "bfloat16" and the fp8 formats included. `pieces` is None except in format 1.
    """

    __pydantic_config__ = STRICT
    path: Text
    shape: tuple[Count, ...]
    dtype: str
    pieces: tuple[Piece, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a complete checkpoint.

    `about`: JSON data that this package does not interpret.
    """

    __pydantic_config__ = STRICT
    format: int
    step: Count
    about: dict[str, Any]
    arrays: tuple[StoredArray, ...]
    files: tuple[StoredFile, ...]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and then its hash into a checkpoint's folder.

    Raises:
        OSError: the disk is full or missing.
    """
    fields = dataclasses.asdict(manifest)
    for array in fields["arrays"]:
        if array["pieces"] is None:
            del array["pieces"]
    text = json.dumps(fields, indent=1).encode()
    for name, data in ((MANIFEST, text), (MANIFEST_HASH, hash_line(text))):
        with (folder / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder)


def hash_line(manifest: bytes) -> bytes:
    """Return the contents of `manifest.json.sha256`, which `sha256sum --check` reads."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def stored_files(folder: Path, names: Iterable[str], *, sync: bool) -> list[StoredFile]:
    """Read files of a checkpoint, several at once; return their sizes and hashes.

    Args:
        sync: also make them survive a loss of power.

    Raises:
        OSError: a file cannot be read.
    """

    def one(name: str) -> StoredFile:
        with (folder / name).open("rb", buffering=0) as file:
            if sync:
                os.fsync(file.fileno())
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return StoredFile(name=name, num_bytes=file.tell(), sha256=sha256)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = list(pool.map(one, names))
    for parent in {(folder / file.name).parent for file in files} if sync else ():
        sync_folder(parent)
    return files


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def verified(folder: Path, step: int) -> Manifest:
    """Return the manifest of a checkpoint after reading every file and checking its hash.

    Raises:
        Damaged: as in `examined`; or a file was altered.
    """
    manifest = examined(folder, step)
    with _reading():
        there = stored_files(folder, [file.name for file in manifest.files], sync=False)
    for expected, found in zip(manifest.files, there, strict=True):
        if found.sha256 != expected.sha256:
            raise Damaged(f"{expected.name} was altered: its hash is not the manifest's")
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
        _check_files(folder, manifest)
    if len({array.path for array in manifest.arrays}) < len(manifest.arrays):
        raise Damaged(f"{MANIFEST} names an array twice")
    if any((array.pieces is None) != (manifest.format == FORMAT) for array in manifest.arrays):
        raise Damaged(f"{MANIFEST} holds arrays of another format than {manifest.format}")
    check_holds_arrays(manifest)
    return manifest


def check_holds_arrays(manifest: Manifest) -> None:
    """Raise if the files that a manifest names cannot hold its arrays, which are stored uncompressed.

    Raises:
        Damaged: TensorStore's database is not among the files, or they have too few bytes.
    """
    if manifest.format != FORMAT or not manifest.arrays:
        return
    sizes = {file.name: file.num_bytes for file in manifest.files if file.name.startswith(f"{STATE}/")}
    if DATABASE not in sizes:
        raise Damaged(f"{MANIFEST} does not name {DATABASE}, which holds the arrays")
    held, needed = sum(sizes.values()), sum(map(_least_bytes, manifest.arrays))
    if held < needed:
        raise Damaged(f"the files in {STATE} have {held:,} bytes, and the arrays need {needed:,}")


def _least_bytes(array: StoredArray) -> int:
    """Return the fewest bytes that an array can take; 0 if its format is unknown here."""
    try:
        bits = format_of_dtype(array.dtype).bits
    except InputError:
        return 0
    return math.prod(array.shape) * bits // 8


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
            raise Damaged(f"{name} is not a file")
    text = (folder / MANIFEST).read_bytes()
    if (folder / MANIFEST_HASH).read_bytes() != hash_line(text):
        raise Damaged(f"{MANIFEST} or {MANIFEST_HASH} was altered: the one is not the hash of the other")
    manifest = parsed(_manifest_reader(), text, MANIFEST)
    if manifest.format not in (FORMAT, FORMAT_OF_PIECES):
        reads = f"{FORMAT_OF_PIECES} and {FORMAT}"
        raise Damaged(f"{MANIFEST} has format {manifest.format}, and this Meshwright reads {reads}")
    return manifest


def parsed(reader: TypeAdapter[Any], text: bytes, name: str) -> Any:
    """Parse the JSON text of a file; check the types of its fields, and not their statements about files.

    Raises:
        Damaged: another version of Meshwright wrote it, or another program.
    """
    try:
        return reader.validate_json(text)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
        where = repr(".".join(map(str, first["loc"])) or "the whole")[1:-1]  # a key may hold any characters
        raise Damaged(f"{name} is not as Meshwright writes it: {where}: {first['msg']}") from wrong


@cache
def _manifest_reader() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def files_below(folder: Path | str, above: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path in `folder` of everything below it that is no folder, and its status.

    Links are not followed.
    """
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(entry.path, f"{above}{entry.name}/")
        else:
            yield f"{above}{entry.name}", entry.stat(follow_symlinks=False)


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Raise if a file is missing, unknown or of the wrong size, before any large file is read."""
    there = dict(files_below(folder))
    expected = {file.name: file.num_bytes for file in manifest.files}
    if len(expected) < len(manifest.files):
        raise Damaged(f"{MANIFEST} names a file twice")
    for name, num_bytes in expected.items():
        if name not in there:
            raise Damaged(f"{name} is missing")
        if not stat.S_ISREG(there[name].st_mode):
            raise Damaged(f"{name} is not a file")
        if there[name].st_size != num_bytes:
            raise Damaged(f"{name} has {there[name].st_size:,} bytes of {num_bytes:,}")
    unknown = sorted(there.keys() - expected.keys() - {MANIFEST, MANIFEST_HASH})
    if unknown:
        raise Damaged(f"{unknown[0]} is not in {MANIFEST}")
