"""Files of data: token files read so that one cut short is an error, and any file told from another.

A memory map of a file that is truncated meanwhile ends the process with SIGBUS, so none is used.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import IdxData, RunConfig, StdlibData, TokenFileData
from meshwright.errors import InputError, MeshwrightError

from ._idx import idx_files
from ._stdlib import stdlib_parts

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64  # so that a file of any size is told from another in about 0.1 s


class TokenFile:
    """Tokens of a raw file, all or a range of them, read when they are asked for.

    It stays the file that was opened, also where another is renamed into its place.

    Args:
        path: of the file.
        dtype: of its tokens, with their byte order.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self._dtype = path, dtype
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as refused:
            raise InputError(
                f"cannot read {path}: {refused.strerror}", hint="name a file that you may read"
            ) from refused
        weakref.finalize(self, os.close, self._descriptor)
        self._whole: TokenFile = self
        self._start, self._stop = 0, os.fstat(self._descriptor).st_size // dtype.itemsize

    def part(self, start: int, stop: int) -> TokenFile:
        """Return the tokens from `start` up to `stop`, without reading them."""
        made = object.__new__(TokenFile)
        made.path, made._dtype, made._descriptor = self.path, self._dtype, self._descriptor
        made._whole = self._whole  # it closes the file once no part is left
        made._start, made._stop = self._start + start, min(self._start + stop, self._stop)
        return made

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, place: slice) -> np.ndarray:
        """Read the tokens of a slice without steps."""
        start, stop, step = place.indices(len(self))
        assert step == 1, "tokens are read in a row"
        return np.frombuffer(self._bytes(start, max(stop - start, 0)), self._dtype)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read `length` tokens from each of `starts` on: [starts, length].

        Raises:
            InputError: the file has been cut short since it was opened.
            MeshwrightError: the disk does not give it.
        """
        rows = [self._bytes(start, length) for start in starts.tolist()]
        return np.frombuffer(b"".join(rows), self._dtype).reshape(len(rows), length)

    def _bytes(self, start: int, count: int) -> bytes:
        size = self._dtype.itemsize
        offset, left = (self._start + start) * size, count * size
        found = b""
        try:
            while len(found) < left:  # the system gives 2 GiB at most
                more = os.pread(self._descriptor, left - len(found), offset + len(found))
                if not more:
                    raise self._cut_short()
                found = found + more if found else more
        except OSError as refused:
            raise MeshwrightError(
                f"cannot read {self.path}: {refused.strerror}",
                hint="look at the disk that holds it; then go on with --resume",
            ) from refused
        return found

    def _cut_short(self) -> InputError:
        now, before = os.fstat(self._descriptor).st_size, self._whole._stop * self._dtype.itemsize
        return InputError(
            f"{self.path} was cut short while it was read: it has {now} bytes, and had {before} when it was "
            "opened",
            hint="put the whole file back; then go on with --resume",
        )


def data_identity(config: RunConfig) -> dict[str, Any] | None:
    """Return what tells a run's data from other data, as JSON: `name`, `num_bytes`, `hashed` and `sha256`.

    Of a file of at most 64 MiB all bytes are hashed. Of a longer one 64 blocks of 1 MiB are, spread evenly
    from its first byte to its last: a file that was replaced, cut or made again is found, a change between
    the blocks is not. `hashed` says which. Python's sources are hashed whole. None where the data comes from
    the seed.

    Raises:
        InputError: a file cannot be read.
    """
    data = config.data
    if isinstance(data, TokenFileData):
        return _identity(data.path, [Path(data.path)])
    if isinstance(data, IdxData):
        return _identity(data.folder, idx_files(Path(data.folder)))
    if isinstance(data, StdlibData):
        parts = stdlib_parts(data.held_out_fraction).values()
        digest = hashlib.sha256(b"".join(hashlib.sha256(part.data).digest() for part in parts))
        return {
            "name": "Python's standard library",
            "num_bytes": sum(part.nbytes for part in parts),
            "hashed": "whole",
            "sha256": digest.hexdigest(),
        }
    return None


def _identity(name: str, paths: list[Path]) -> dict[str, Any]:
    digest, total, is_whole = hashlib.sha256(), 0, True
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                total += size
                starts = range(0, size, BLOCK_BYTES)
                if len(starts) > NUM_BLOCKS:
                    is_whole, last = False, size - BLOCK_BYTES
                    starts = [last * number // (NUM_BLOCKS - 1) for number in range(NUM_BLOCKS)]
                for start in starts:
                    digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
        except OSError as refused:
            raise InputError(
                f"cannot read {path}: {refused.strerror}", hint="name a file that is there and may be read"
            ) from refused
    hashed = "whole" if is_whole else f"{NUM_BLOCKS} blocks of {BLOCK_BYTES} bytes"
    return {"name": name, "num_bytes": total, "hashed": hashed, "sha256": digest.hexdigest()}


def identity_difference(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Return in words how one identity of data differs from another; empty where it does not."""
    if was["num_bytes"] != now["num_bytes"]:
        return f"it has {now['num_bytes']} bytes, and had {was['num_bytes']}"
    same = was["hashed"] != now["hashed"] or was["sha256"] == now["sha256"]  # ways cannot be compared
    return "" if same else f"its {now['num_bytes']} bytes are as many as before, and not the same"
