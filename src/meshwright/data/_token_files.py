"""Read token files with the facts recorded about them, and identify the data of a run.

A token file's facts are in a JSON file next to it; `open_data` checks the configuration against them. A token
file is read with `pread`, so that one cut short raises an error. A memory map is not used: if the file is
truncated meanwhile, it ends the process with SIGBUS. The sources of the Python standard library are also read
here, as bytes: real text that exists on almost every machine. `data_identity` distinguishes a run's data from
other data.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sysconfig
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from meshwright.config import IdxData, RunConfig, StdlibData, TokenFileData
from meshwright.errors import InputError, MeshwrightError

from ._images import idx_files
from ._order import Split

# Third-party packages, and tests: these are long and repetitive, and not installed everywhere.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@functools.cache
def stdlib_parts(held_out_fraction: float) -> dict[Split, np.ndarray]:
    """Return the standard library's sources without tests as uint8, in order of paths, split by whole files.

    Every n-th file is held out, n = round(1 / `held_out_fraction`). The text is that of the running
    interpreter, so it differs between Python releases.

    Raises:
        InputError: this interpreter has too few sources on disk to hold one file out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    paths = sorted(path.as_posix() for path in relative if _LEFT_OUT.isdisjoint(path.parts))
    every = round(1 / held_out_fraction)
    if len(paths) < every:
        raise InputError(
            f"{folder} has {len(paths)} Python sources, and data.held_out_fraction = {held_out_fraction} "
            f"needs at least {every}",
            hint='use a Python with its sources on disk, or data.source = "tokens" with a file of your own',
        )
    files = [(folder / path).read_bytes() for path in paths]
    held_out = files[every - 1 :: every]
    del files[every - 1 :: every]
    return {"train": _joined(files), "held-out": _joined(held_out)}


def _joined(files: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(files), np.uint8)  # read-only, as a cached array must be


BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64  # identifies a file of any size in about 0.1 s


class TokenFile:
    """The tokens of a raw file, or of a range of it, read on demand.

    The object keeps reading the file that it opened, even if another file is renamed to its path.

    Args:
        path: the file.
        dtype: the type of its tokens, with byte order.

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
        made._whole = self._whole  # keeps the file open while this part exists
        made._start, made._stop = self._start + start, min(self._start + stop, self._stop)
        return made

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, place: slice) -> np.ndarray:
        """Read the tokens of a slice with step 1."""
        start, stop, step = place.indices(len(self))
        assert step == 1, "tokens are read in a row"
        return np.frombuffer(self._bytes(start, max(stop - start, 0)), self._dtype)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read `length` tokens from each of `starts`; return [starts, length].

        Raises:
            InputError: the file has been cut short since it was opened.
            MeshwrightError: the disk fails to return the tokens.
        """
        rows = [self._bytes(start, length) for start in starts.tolist()]
        return np.frombuffer(b"".join(rows), self._dtype).reshape(len(rows), length)

    def _bytes(self, start: int, count: int) -> bytes:
        size = self._dtype.itemsize
        offset, left = (self._start + start) * size, count * size
        found = b""
        try:
            while len(found) < left:  # one call returns 2 GiB at most
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
    """Return a fingerprint of a run's data as JSON: `name`, `num_bytes`, `hashed` and `sha256`.

    A file of at most 64 MiB is hashed whole. From a longer one, 64 blocks of 1 MiB are hashed, spread evenly
    from the first byte to the last. This detects a file that was replaced, cut or made again, but not a
    change between the blocks. `hashed` says which of the two was done. Python's sources are hashed whole. The
    result is None if the data comes from the seed.

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
    """Describe how one identity of data differs from another; empty if it does not."""
    if was["num_bytes"] != now["num_bytes"]:
        return f"it has {now['num_bytes']} bytes, and had {was['num_bytes']}"
    # Hashes of different extents cannot be compared.
    same = was["hashed"] != now["hashed"] or was["sha256"] == now["sha256"]
    return "" if same else f"its {now['num_bytes']} bytes are as many as before, and not the same"


SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """One text that was tokenized, with `path` as the caller wrote it."""

    path: str
    num_bytes: int
    sha256: str
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileFacts:
    """The content and origin of a token file.

    `tokenizer`: "bytes", or a file's name. `tokenizer_sha256`: the hash of that file. `vocab_size`: the
    number of possible ids, including the id that ends a document. `inputs`: in the order of their tokens in
    the file.
    """

    schema: int
    tokenizer: str
    tokenizer_sha256: str | None
    dtype: str
    vocab_size: int
    end_of_document: int | None
    num_tokens: int
    num_documents: int
    inputs: tuple[InputFacts, ...]

    def as_json(self) -> str:
        """Return the content of the file that `read_facts` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"


def facts_path(tokens: Path) -> Path:
    """Return the path of a token file's facts: its name with `.json` appended."""
    return tokens.with_name(tokens.name + ".json")


def read_facts(tokens: Path) -> TokenFileFacts | None:
    """Read the facts of a token file; return None if it has none.

    Raises:
        InputError: the facts cannot be read, or follow the schema of another release.
    """
    path = facts_path(tokens)
    if not path.is_file():
        return None
    hint = f"make the tokens again, or remove {path.name} and set the data section by hand"
    try:
        facts = TypeAdapter(TokenFileFacts).validate_json(path.read_bytes())
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise InputError(
            f"{path} does not describe a token file: {where}: {first['msg']}", hint=hint
        ) from wrong
    except OSError as refused:
        raise InputError(f"cannot read {path}: {refused.strerror}", hint=hint) from refused
    if facts.schema != SCHEMA:
        raise InputError(f"{path} has schema {facts.schema}, and this release reads {SCHEMA}", hint=hint)
    return facts


def check_facts(data: TokenFileData, facts: TokenFileFacts, vocab_size: int) -> None:
    """Check a configuration against the facts of its token file.

    Raises:
        InputError: the type, length, vocabulary or end of document differs from the file's.
    """
    path, beside = Path(data.path), facts_path(Path(data.path)).name
    if data.dtype != facts.dtype:
        raise InputError(
            f"data.dtype = {data.dtype!r}, but {path} holds {facts.dtype} by {beside}",
            hint=f"use data.dtype = {facts.dtype!r}",
        )
    num_bytes, wanted = path.stat().st_size, facts.num_tokens * np.dtype(facts.dtype).itemsize
    if num_bytes != wanted:
        raise InputError(
            f"{path} has {num_bytes} bytes, and {beside} says {facts.num_tokens} tokens of {facts.dtype}, "
            f"{wanted} bytes",
            hint="copy both again, or make the tokens again",
        )
    if facts.vocab_size > vocab_size:
        raise InputError(
            f"{path} may hold ids below {facts.vocab_size} by {beside}, and model.vocab_size = {vocab_size}",
            hint=f"use at least model.vocab_size = {facts.vocab_size}",
        )
    if data.end_of_document not in (None, facts.end_of_document):
        known = facts.end_of_document
        raise InputError(
            f"data.end_of_document = {data.end_of_document}, but in {path} "
            + ("no document has an end" if known is None else f"it is {known}")
            + f" by {beside}",
            hint='use data.documents = "joined", or make the tokens with --end-of-document'
            if known is None
            else f"use data.end_of_document = {known}",
        )
