"""Read token files and the description that lies beside each.

The sources of the Python standard library as bytes: real text that is on every machine.

Files of data: token files read so that one cut short is an error, and any file told from another.

A memory map of a file that is truncated meanwhile ends the process with SIGBUS, so none is used.

What is known of a token file: a JSON file beside it, which the loader holds the configuration to.
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

# Packages of others, and tests, which are long, repeat themselves and are not installed everywhere.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@functools.cache
def stdlib_parts(held_out_fraction: float) -> dict[Split, np.ndarray]:
    """All sources but tests, in the order of their paths, as uint8; every n-th whole file is held out.

    The text is that of the running interpreter, so it differs between Python releases.

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


SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """One text that was tokenized; `path` as it was given."""

    path: str
    num_bytes: int
    sha256: str
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileFacts:
    """What a token file holds and what made it.

    `tokenizer`: "bytes", or a file's name; `tokenizer_sha256`: of that file. `vocab_size`: ids there may be,
    that of the end of a document included. `inputs`: in the order of the file.
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
        """The content of the file that `read_facts` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"


def facts_path(tokens: Path) -> Path:
    """Where the facts of a token file are: its name with `.json` behind it."""
    return tokens.with_name(tokens.name + ".json")


def read_facts(tokens: Path) -> TokenFileFacts | None:
    """The facts of a token file; None where there are none.

    Raises:
        InputError: they cannot be read, or are of another release's schema.
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
    """Hold a configuration to what is known of its token file.

    Raises:
        InputError: another type, length, vocabulary or end of document than the file's.
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
