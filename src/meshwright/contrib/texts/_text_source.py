"""Tokenize the texts of a run once, and keep their tokens in the cache.

The name of a token file in the cache is a hash of the settings and of each text's path, size and time of its
last change, so that a changed text is tokenized again. A token file of `meshwright data tokenize` that lies
beside a text and was made of it, with the same tokenizer, is read in place of one in the cache. Once the
files in the cache exceed its limit, the least recently used are removed; a run keeps its own open.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from meshwright.compiler import cache_root, limit_bytes, writing_cache
from meshwright.config import TextData, TokenFileData
from meshwright.errors import InputError
from meshwright.trainer.data import OnProgress

from ._metadata import TOKEN_SCHEMA, TokenFileMetadata, metadata_path, read_metadata
from ._texts import PIECE_BYTES, Tokenizer, open_tokenizer, pieces_of, tokenizer_path
from ._tokenize import sha256_of, tokenize

_FITS_UINT16 = 1 << 16


def text_paths(data: TextData) -> list[Path]:
    """Return the texts of a source, in order.

    Raises:
        InputError: there are none, or one is empty.
    """
    return list(dict.fromkeys(Path(piece.path) for piece in pieces_of([data.path], 1 << 62)))


def tokens_of_texts(data: TextData, on_progress: OnProgress) -> TokenFileData:
    """Return the token file of a run's texts as a source of its own; make it first if it does not exist.

    Raises:
        InputError: a text or the tokenizer is missing or cannot be read.
    """
    opened = open_tokenizer(tokenizer_path(data.tokenizer))
    paths = text_paths(data)
    path, metadata = _beside(data, paths, opened) or _in_cache(data, paths, opened, on_progress)
    end = metadata.end_of_document if data.documents == "packed" else None
    shared = data.model_dump(include={"held_out_fraction", "order", "documents"})
    about = {"source": "tokens", "path": str(path), "dtype": metadata.dtype, "end_of_document": end}
    return TokenFileData.model_validate({**about, **shared})


def _end_of(data: TextData, opened: Tokenizer) -> int | None:
    return None if data.end_of_document is None else opened.end_of_document(data.end_of_document)


def _beside(
    data: TextData, paths: Sequence[Path], opened: Tokenizer
) -> tuple[Path, TokenFileMetadata] | None:
    """Return a token file beside the text that `data tokenize` made of just this text; None if none is."""
    if len(paths) != 1:
        return None
    for described in sorted(paths[0].parent.glob("*.bin.json")):
        tokens = described.with_suffix("")
        try:
            metadata = read_metadata(tokens)
        except InputError:  # another program's file
            continue
        if metadata is None or not tokens.is_file() or len(metadata.inputs) != 1:
            continue
        (made_of,) = metadata.inputs
        made = metadata.tokenizer_sha256, metadata.end_of_document, made_of.num_bytes
        wanted = opened.sha256, _end_of(data, opened), paths[0].stat().st_size
        if made == wanted and made_of.sha256 == sha256_of(str(paths[0])):
            return tokens, metadata
    return None


def _in_cache(
    data: TextData, paths: Sequence[Path], opened: Tokenizer, on_progress: OnProgress
) -> tuple[Path, TokenFileMetadata]:
    """Return the token file in the cache; one process makes it, and others wait for it."""
    end = _end_of(data, opened)
    largest = max(opened.num_ids - 1, end or 0)
    dtype = "uint16" if largest < _FITS_UINT16 else "uint32"
    about = {
        "schema": TOKEN_SCHEMA,
        "texts": [asdict(piece) for piece in pieces_of([data.path], 1 << 62)],
        "settings": [opened.sha256, dtype, end, data.text_key],
    }
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    target = cache_root() / "tokens" / f"{name}.bin"
    with writing_cache():
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not target.is_file():
            tokenize(
                [data.path],
                str(target),
                tokenizer=tokenizer_path(data.tokenizer),
                dtype=dtype,
                end_of_document=data.end_of_document,
                text_key=data.text_key,
                on_progress=on_progress,
                piece_bytes=PIECE_BYTES,
            )
            _prune(target)
        metadata = read_metadata(target)
        with contextlib.suppress(OSError):  # a read-only cache
            os.utime(target)
    assert metadata is not None, f"`tokenize` wrote no {metadata_path(target)}"
    return target, metadata


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file in the cache; wait for the process that holds it."""
    with contextlib.ExitStack() as held:
        with writing_cache():
            lock = held.enter_context(path.open("a"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prune(newest: Path) -> None:
    """Remove the least recently used token files until the rest is within the cache's limit."""
    files = [(path.stat().st_mtime, path.stat().st_size, path) for path in newest.parent.glob("*.bin")]
    excess = sum(num_bytes for _, num_bytes, _ in files) - limit_bytes()
    for _, num_bytes, path in sorted(files):
        if excess > 0 and path != newest:
            excess -= num_bytes
            for each in (path, metadata_path(path), path.with_suffix(".lock")):
                each.unlink(missing_ok=True)
