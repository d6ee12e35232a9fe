"""Write token files from texts, in parallel and resumably; a file appears only when it is complete.

The tokens of each piece of work go to a part, a file in `FILE.partial`. A part's name is a hash of everything
that its content depends on: the settings, the input's path, size and modification time, and the byte range. A
record next to the part is written last; a part counts as done once its record exists. Both appear by
renaming. When all parts are done they are joined in the order of the inputs. First the metadata, then the
token file are moved into place. After a crash or a kill, the same command continues from the finished parts.
This needs twice the file's bytes on disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from meshwright.errors import InputError, MeshwrightError
from meshwright.files import open_file, read_json
from meshwright.subprocesses import safe_path
from meshwright.trainer.data import BYTES, OnProgress

from ._metadata import DTYPES, TOKEN_SCHEMA, InputMetadata, TokenFileMetadata, metadata_path, read_metadata
from ._texts import PIECE_BYTES, TextPiece, Tokenizer, fragments_in, open_tokenizer, pieces_of

_ENCODED_AT_ONCE = 1 << 20  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that determine the tokens of a text; `tokenizer` as it was named, with its file's hash."""

    tokenizer: str
    tokenizer_sha256: str | None
    dtype: str
    end_of_document: int | None
    text_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPart:
    """The number of tokens and documents of a piece."""

    num_tokens: int
    num_documents: int


def part_path(folder: Path, piece: TextPiece, settings: Settings) -> Path:
    """Return the path of a piece's tokens."""
    absolute = str(Path(piece.path).resolve())
    about = json.dumps([asdict(piece) | {"path": absolute}, asdict(settings)], sort_keys=True)
    return folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.bin"


def finished_part(path: Path, dtype: str) -> TokenPart | None:
    """Return the record of a part that an earlier run finished; None if the part is not complete."""
    try:
        part = TokenPart(**read_json(path.with_suffix(".json")))
        if type(part.num_tokens) is not int or type(part.num_documents) is not int:
            return None
        whole = path.stat().st_size == part.num_tokens * np.dtype(dtype).itemsize
    except (OSError, ValueError, TypeError):  # missing, cut short or altered: made again
        return None
    return part if whole else None


def make_part(path: Path, piece: TextPiece, settings: Settings, tokenizer: Tokenizer) -> TokenPart:
    """Tokenize a piece and write its part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    num_tokens = num_documents = 0
    with writing(temporary), temporary.open("wb") as file:
        for batch in _batches(fragments_in(piece, settings.text_key, tokenizer)):
            encoded = tokenizer.encode([text for text, _ in batch])
            for ids, (_, is_end) in zip(encoded, batch, strict=True):
                num_documents += is_end
                tokens = as_dtype(ids, settings, piece.path, is_end)
                num_tokens += tokens.size
                file.write(tokens.tobytes())
    part = TokenPart(num_tokens=num_tokens, num_documents=num_documents)
    temporary.replace(path)
    write_whole(path.with_suffix(".json"), json.dumps(asdict(part)).encode())
    return part


def as_dtype(ids: np.ndarray, settings: Settings, where: str, is_end: bool = True) -> np.ndarray:
    """Convert ids to the file's type; behind a document's end append the id that ends it, if there is one."""
    dtype = np.dtype(settings.dtype).newbyteorder("<")
    if settings.end_of_document is not None and is_end:
        ids = np.append(ids.astype(np.uint32), np.uint32(settings.end_of_document))
    most = int(np.iinfo(dtype).max)
    if ids.size and int(ids.max()) > most:
        raise InputError(
            f"{where}: the tokenizer gives id {int(ids.max())}, and {settings.dtype} holds at most {most}",
            hint="use --dtype uint32",
        )
    return ids.astype(dtype)


def sha256_of(path: str) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Run the block, and explain a failed write with the free space at `path`."""
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
    """Write a small file that exists completely or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with writing(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def _batches(texts: Iterator[tuple[str, bool]]) -> Iterator[Sequence[tuple[str, bool]]]:
    """Yield lists of fragments, each with about `_ENCODED_AT_ONCE` characters."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text, is_end in texts:
        batch.append((text, is_end))
        size += len(text)
        if size >= _ENCODED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# The code from here to `work` runs in the worker processes.

_tokenizer: Tokenizer | None = None


def start_worker(name: str) -> None:
    """Open the tokenizer once, ignore Ctrl-C (the parent handles it), and end when the parent ends."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core already has a process
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by its parent"
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _tokenizer = open_tokenizer(name)


def _end_with(sentinel: int) -> None:
    """End this worker when its parent ends.

    A killed parent cannot end its workers, which would wait for work forever.
    """
    wait([sentinel])
    os._exit(1)


def work(path: Path, piece: TextPiece, settings: Settings) -> TokenPart:
    """Run `make_part` in a worker."""
    assert _tokenizer is not None, "start_worker comes first"
    return make_part(path, piece, settings, _tokenizer)


def tokenize(
    inputs: Sequence[str],
    to: str,
    *,
    tokenizer: str = BYTES,
    dtype: str = "uint16",
    end_of_document: str | None = None,
    text_key: str = "text",
    workers: int = 1,
    on_progress: OnProgress = lambda done, total: None,
    piece_bytes: int = PIECE_BYTES,
) -> TokenFileMetadata:
    """Write the tokens of texts to a file, and their metadata to a JSON file next to it.

    Args:
        inputs: files and folders; `.jsonl` and `.ndjson` hold a document per line, `.parquet` one per row,
            any other file is one document.
        to: the file to write.
        tokenizer: "bytes", or the path of a `tokenizer.json`.
        dtype: uint16, int32 or uint32.
        end_of_document: appended to each document: 256 for bytes; a token or its id for a tokenizer.json.
        text_key: the key of the text in a line's object, or the name of a Parquet file's column.
        workers: the number of processes. If more than one, each imports your script, whose work must then be
            below `if __name__ == "__main__":`, as for any use of `multiprocessing`.
        on_progress: called with the bytes of text done and the bytes of all texts.
        piece_bytes: the size of the pieces into which a long file of lines is divided among workers.

    Raises:
        InputError: the inputs, the tokenizer or the destination are wrong; finished work is kept.
        MeshwrightError: the disk is full, or a worker died.
    """
    target = Path(to)
    if not target.name:
        raise InputError(f"--to {to!r} names no file", hint="name a file, as in tokens.bin")
    opened, settings = _settings(tokenizer, dtype, end_of_document, text_key)
    pieces = pieces_of(inputs, piece_bytes)
    if workers < 1:
        raise InputError(
            f"--workers {workers}: at least one is needed", hint="use --workers 1, or leave it out"
        )
    folder = target.with_name(f"{target.name}.partial")
    if target.exists() and not folder.exists():
        raise _is_there(target)
    with _alone(folder):
        if target.exists():  # killed after the last rename, or the folder is from an older run
            metadata = read_metadata(target)
            shutil.rmtree(folder)
            if metadata is None or not _matches(metadata, opened, settings, pieces):
                raise _is_there(target)
            return metadata
        paths = [part_path(folder, piece, settings) for piece in pieces]
        parts = _all_parts(list(zip(paths, pieces, strict=True)), settings, opened, workers, on_progress)
        metadata = _metadata(pieces, parts, settings, opened)
        _join(folder, paths, target, metadata)
    return metadata


def _is_there(target: Path) -> InputError:
    return InputError(f"{target} is there already", hint="remove it, or name another file with --to")


def _settings(
    tokenizer: str, dtype: str, end_of_document: str | None, text_key: str
) -> tuple[Tokenizer, Settings]:
    if dtype not in DTYPES:
        raise InputError(
            f"--dtype {dtype!r}: no type of tokens", hint=f"use {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
        )
    opened = open_tokenizer(tokenizer)
    end = None if end_of_document is None else opened.end_of_document(end_of_document)
    most = int(np.iinfo(dtype).max)
    largest = max(opened.num_ids - 1, end or 0)
    if largest > most:
        raise InputError(
            f"{opened.name} has ids up to {largest}, and {dtype} holds at most {most}",
            hint="use --dtype uint32",
        )
    about = {"tokenizer": tokenizer, "tokenizer_sha256": opened.sha256, "dtype": dtype}
    return opened, Settings(**about, end_of_document=end, text_key=text_key)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder of parts for this process; the lock ends with the process, however that ends."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise InputError(
                f"another process is at work in {folder}", hint="wait for it, or name another file with --to"
            ) from taken
        yield
    finally:
        os.close(lock)


def _matches(
    metadata: TokenFileMetadata, opened: Tokenizer, settings: Settings, pieces: Sequence[TextPiece]
) -> bool:
    made = (metadata.tokenizer, metadata.tokenizer_sha256, metadata.dtype, metadata.end_of_document)
    wanted = (opened.name, opened.sha256, settings.dtype, settings.end_of_document)
    named = list(dict.fromkeys(piece.path for piece in pieces))
    return made == wanted and [text.path for text in metadata.inputs] == named


def _all_parts(
    work_to_do: list[tuple[Path, TextPiece]],
    settings: Settings,
    opened: Tokenizer,
    workers: int,
    on_progress: OnProgress,
) -> list[TokenPart]:
    """Return the part of every piece, from this run or an earlier one."""
    parts: dict[Path, TokenPart] = {}
    for path, _ in work_to_do:
        if (part := finished_part(path, settings.dtype)) is not None:
            parts[path] = part
    missing = [(path, piece) for path, piece in work_to_do if path not in parts]
    total = sum(piece.stop - piece.start for _, piece in work_to_do)
    done = total - sum(piece.stop - piece.start for _, piece in missing)
    on_progress(done, total)
    count = min(workers, len(missing))
    made = ((path, piece, make_part(path, piece, settings, opened)) for path, piece in missing)
    for path, piece, part in made if count < 2 else _made_by(count, missing, settings):
        parts[path] = part
        done += piece.stop - piece.start
        on_progress(done, total)
    return [parts[path] for path, _ in work_to_do]


def _made_by(
    count: int, missing: Sequence[tuple[Path, TextPiece]], settings: Settings
) -> Iterator[tuple[Path, TextPiece, TokenPart]]:
    """Make parts in other processes and yield each when it is finished; the first error ends the work."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    with safe_path():
        pool = ProcessPoolExecutor(count, context, start_worker, (settings.tokenizer,))
    try:
        # A worker ignores Ctrl-C only once it has finished its imports, so it starts with the signal blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with safe_path():  # submitting work starts the processes
                futures = {pool.submit(work, path, piece, settings): (path, piece) for path, piece in missing}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for future in as_completed(futures):
            yield *futures[future], future.result()
    except BrokenProcessPool as died:
        raise MeshwrightError(
            "a worker process died, perhaps for lack of memory",
            hint="run the same command again with fewer --workers: it goes on where it stopped",
        ) from died
    finally:
        pool.shutdown(cancel_futures=True)


def _metadata(
    pieces: Sequence[TextPiece], parts: Sequence[TokenPart], settings: Settings, opened: Tokenizer
) -> TokenFileMetadata:
    inputs: dict[str, InputMetadata] = {}
    for piece, part in zip(pieces, parts, strict=True):
        now = Path(piece.path).stat()
        if (now.st_size, now.st_mtime_ns) != (piece.num_bytes, piece.modified_ns):
            hint = "run the same command again once it rests"
            raise InputError(f"{piece.path} changed while it was tokenized", hint=hint)
        known = inputs.get(piece.path)
        inputs[piece.path] = InputMetadata(
            path=piece.path,
            num_bytes=piece.num_bytes,
            sha256=known.sha256 if known else sha256_of(piece.path),
            num_documents=part.num_documents + (known.num_documents if known else 0),
            num_tokens=part.num_tokens + (known.num_tokens if known else 0),
        )
    end = settings.end_of_document
    return TokenFileMetadata(
        schema=TOKEN_SCHEMA,
        tokenizer=opened.name,
        tokenizer_sha256=opened.sha256,
        dtype=settings.dtype,
        vocab_size=opened.num_ids if end is None else max(opened.num_ids, end + 1),
        end_of_document=end,
        num_tokens=sum(part.num_tokens for part in parts),
        num_documents=sum(part.num_documents for part in parts),
        inputs=tuple(inputs.values()),
    )


def _join(folder: Path, paths: Sequence[Path], target: Path, metadata: TokenFileMetadata) -> None:
    """Join all parts into one file, which appears complete, after its metadata."""
    joined = folder / "joined"
    with writing(joined):
        with joined.open("wb") as file:
            for path in paths:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        write_whole(metadata_path(target), metadata.as_json().encode())
        joined.replace(target)
    shutil.rmtree(folder)
