"""The manifest of a checkpoint: which arrays lie where in which files, and each file's size and hash.

A checkpoint's folder holds the files of arrays, `manifest.json`, and `manifest.json.sha256`, the
manifest's own hash as `sha256sum` writes it. The two are written last, in this order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.json.sha256"
FORMAT = 1
READ_BYTES = 1 << 22  # at a time; hashing lets other threads run


class Damaged(Exception):
    """A checkpoint is not what was written; the text names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of an array: where it begins in the array, its shape, and where its bytes lie, in C order."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array of the state by its path ("parameters/head"), and the pieces that make it up.

    `dtype` is numpy's name, "bfloat16" and the fp8 formats included.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint. `about` is JSON data, of which this package knows nothing."""

    step: int
    about: dict[str, Any]
    arrays: tuple[StoredArray, ...]
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        """Of all files of arrays."""
        return sum(file.num_bytes for file in self.files)

    def to_json(self) -> str:
        """As it is written."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)


def hash_line(manifest: bytes) -> bytes:
    """What `manifest.json.sha256` holds; `sha256sum --check` reads it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def verified(folder: Path, step: int) -> Manifest:
    """The manifest of a checkpoint whose every file has been read and is what was written.

    Raises:
        Damaged: a file is missing, cut, altered, unknown or unreadable.
    """
    try:
        manifest = _manifest(folder)
        if manifest.step != step:
            raise Damaged(f"{MANIFEST} is of step {manifest.step}")
        _check_names(folder, manifest)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(lambda file: _check_file(folder, file), manifest.files):
                pass
    except OSError as refused:
        name = Path(str(refused.filename)).name if refused.filename else "a file"
        raise Damaged(f"{name} cannot be read: {refused.strerror}") from refused
    return manifest


def _manifest(folder: Path) -> Manifest:
    for name in (MANIFEST, MANIFEST_HASH):
        if not (folder / name).exists():
            raise Damaged(f"{name} is missing")
    text = (folder / MANIFEST).read_bytes()
    if (folder / MANIFEST_HASH).read_bytes() != hash_line(text):
        raise Damaged(f"{MANIFEST} or {MANIFEST_HASH} was altered: the one is not the hash of the other")
    return manifest_of(text)


def manifest_of(text: bytes) -> Manifest:
    """What `to_json` wrote.

    Raises:
        Damaged: another version of Meshwright did.
    """
    fields = json.loads(text)
    if fields["format"] != FORMAT:
        raise Damaged(f"{MANIFEST} has format {fields['format']}, and this Meshwright reads {FORMAT}")
    return Manifest(
        step=fields["step"],
        about=fields["about"],
        arrays=tuple(_array(array) for array in fields["arrays"]),
        files=tuple(StoredFile(**file) for file in fields["files"]),
    )


def _array(fields: dict[str, Any]) -> StoredArray:
    pieces = tuple(
        Piece(
            start=tuple(piece["start"]),
            shape=tuple(piece["shape"]),
            file=piece["file"],
            offset_bytes=piece["offset_bytes"],
        )
        for piece in fields["pieces"]
    )
    shape = tuple(fields["shape"])
    return StoredArray(path=fields["path"], shape=shape, dtype=fields["dtype"], pieces=pieces)


def _check_names(folder: Path, manifest: Manifest) -> None:
    """No file more, none less, all of the right size: told before anything long is read."""
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
