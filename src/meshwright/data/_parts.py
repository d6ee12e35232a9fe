"""Tokens of pieces, each written to a file of its own, so that work done is never done again.

A part is named by a hash of all that it depends on: settings, the input's path, size and time, the range.
It counts as done once the record beside it is there, which is written last; both appear by renaming.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from meshwright.errors import InputError, MeshwrightError

from ._texts import Piece, documents_in
from ._tokenizers import Tokenizer, open_tokenizer

_ENCODED_AT_ONCE = 1 << 20  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that decides the tokens of a text; `tokenizer` as it was named, with a file's hash."""

    tokenizer: str
    tokenizer_sha256: str | None
    dtype: str
    end_of_document: int | None
    text_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a piece came to."""

    num_tokens: int
    num_documents: int


def part_path(folder: Path, piece: Piece, settings: Settings) -> Path:
    """Where the tokens of a piece go."""
    absolute = str(Path(piece.path).resolve())
    about = json.dumps([asdict(piece) | {"path": absolute}, asdict(settings)], sort_keys=True)
    return folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.bin"


def finished_part(path: Path, dtype: str) -> Part | None:
    """What an earlier run left of a part; None where it is not whole."""
    try:
        part = Part(**json.loads(_record_of(path).read_bytes()))
        whole = path.stat().st_size == part.num_tokens * np.dtype(dtype).itemsize
    except (OSError, ValueError, TypeError, RecursionError):  # missing, cut short or altered: it is made anew
        return None
    return part if whole else None


def make_part(path: Path, piece: Piece, settings: Settings, tokenizer: Tokenizer) -> Part:
    """Tokenize a piece.

    Raises:
        InputError: the text is wrong, or an id does not fit the type.
        MeshwrightError: the part cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    num_tokens = num_documents = 0
    with writing(temporary), temporary.open("wb") as file:
        for texts in _batches(documents_in(piece, settings.text_key)):
            num_documents += len(texts)
            for ids in tokenizer.encode(texts):
                tokens = as_dtype(ids, settings, piece.path)
                num_tokens += tokens.size
                file.write(tokens.tobytes())
    part = Part(num_tokens=num_tokens, num_documents=num_documents)
    temporary.replace(path)
    write_whole(_record_of(path), json.dumps(asdict(part)).encode())
    return part


def as_dtype(ids: np.ndarray, settings: Settings, where: str) -> np.ndarray:
    """Ids in the file's type, with the end of the document.

    Raises:
        InputError: an id does not fit.
    """
    dtype = np.dtype(settings.dtype).newbyteorder("<")
    if settings.end_of_document is not None:
        ids = np.append(ids.astype(np.uint32), np.uint32(settings.end_of_document))
    most = int(np.iinfo(dtype).max)
    if ids.size and int(ids.max()) > most:
        raise InputError(
            f"{where}: the tokenizer gives id {int(ids.max())}, and {settings.dtype} holds at most {most}",
            hint="use --dtype uint32",
        )
    return ids.astype(dtype)


def sha256_of(path: str) -> str:
    """The hash of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the disk says no to into words.

    Raises:
        MeshwrightError: the disk is full, or refuses.
    """
    try:
        yield
    except OSError as refused:
        there = next(folder for folder in path.absolute().parents if os.path.isdir(folder))
        free = shutil.disk_usage(there).free
        raise MeshwrightError(
            f"cannot write {path}: {refused.strerror}; {free} bytes are free there",
            hint="make room and run the same command again: it goes on where it stopped",
        ) from refused


def write_whole(path: Path, content: bytes) -> None:
    """A small file that is there whole or not at all.

    Raises:
        MeshwrightError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with writing(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def _record_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _batches(texts: Iterator[str]) -> Iterator[Sequence[str]]:
    """Texts in lists of about as many characters as are encoded at once."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _ENCODED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# What follows runs in the worker processes.

_tokenizer: Tokenizer | None = None


def start_worker(name: str) -> None:
    """Open the tokenizer once, leave Ctrl-C to the parent, and end when the parent does."""
    import multiprocessing
    import signal

    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by its parent"
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _tokenizer = open_tokenizer(name)


def _end_with(sentinel: int) -> None:
    """A killed parent cannot end its workers, which would wait for work forever."""
    from multiprocessing.connection import wait

    wait([sentinel])
    os._exit(1)


def work(path: Path, piece: Piece, settings: Settings) -> Part | tuple[str, str, bool]:
    """`make_part` in a worker; an error as message, hint, and whether the input is at fault: an exception
    would lose its hint on the way to the parent."""
    assert _tokenizer is not None, "start_worker comes first"
    try:
        return make_part(path, piece, settings, _tokenizer)
    except MeshwrightError as error:
        return error.message, error.hint, isinstance(error, InputError)
