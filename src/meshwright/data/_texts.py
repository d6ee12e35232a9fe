"""Texts to be tokenized: which files, in which pieces of work, which documents.

A file whose name ends in `.jsonl` or `.ndjson` holds a JSON object per line, each a document; blank lines
are none. Any other file is one document. A piece of work is a whole file, or the lines that begin in a
range of bytes of a long one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError, nearest_name

LINES = (".jsonl", ".ndjson")
PIECE_BYTES = 1 << 24
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes `start` to `stop` of an input; `modified_ns` tells whether it is still the file it was."""

    path: str
    num_bytes: int
    modified_ns: int
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole file."""
        return self.stop - self.start == self.num_bytes


def pieces_of(inputs: Sequence[str], piece_bytes: int) -> list[Piece]:
    """The work, in the order of the inputs.

    Raises:
        InputError: no inputs, or one that is missing, a folder, empty, or named twice.
    """
    if not inputs:
        raise InputError("no text was named", hint="name one file or several")
    pieces: list[Piece] = []
    seen: dict[Path, str] = {}
    for name in inputs:
        path = Path(name)
        if os.path.isdir(name):
            raise InputError(f"{name} is a folder", hint=f"name its files, as in {name.rstrip('/')}/*.txt")
        if not os.path.isfile(name):
            raise InputError(f"no text {name}", hint="check the path")
        if (real := path.resolve()) in seen:
            raise InputError(f"{name} is named twice (as {seen[real]})", hint="name each file once")
        seen[real] = name
        facts = path.stat()
        if facts.st_size == 0:
            raise InputError(f"{name} is empty", hint="leave it out")
        size = piece_bytes if path.suffix in LINES else facts.st_size
        pieces += [
            Piece(
                path=name,
                num_bytes=facts.st_size,
                modified_ns=facts.st_mtime_ns,
                start=start,
                stop=min(start + size, facts.st_size),
            )
            for start in range(0, facts.st_size, size)
        ]
    return pieces


def documents_in(piece: Piece, text_key: str) -> Iterator[str]:
    """The documents of a piece, in order.

    Raises:
        InputError: bytes that are no UTF-8, a line that is no JSON object, or has no text under `text_key`.
    """
    path = Path(piece.path)
    try:
        if path.suffix in LINES:
            yield from _lines(piece, text_key)
        else:
            yield _text(path.read_bytes(), piece.path, 0)
    except OSError as refused:
        raise InputError(f"cannot read {path}: {refused.strerror}", hint="check its permissions") from refused


def _text(content: bytes, where: str, first_byte: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as wrong:
        starts = [kind for magic, kind in _COMPRESSED.items() if content.startswith(magic)]
        hint = "convert it, as iconv -t utf-8 does"
        if starts and not first_byte:
            hint = f"it is compressed by {starts[0]}; unpack it first"
        what = f"byte {first_byte + wrong.start} (0x{content[wrong.start]:02x}) is no UTF-8"
        raise InputError(f"{where}: {what}", hint=hint) from wrong


def _lines(piece: Piece, text_key: str) -> Iterator[str]:
    with Path(piece.path).open("rb") as file:
        begin = piece.start
        if begin:  # a line that began before belongs to the piece before
            file.seek(begin - 1)
            begin += len(file.readline()) - 1
        while begin < piece.stop and (line := file.readline()):
            if stripped := line.rstrip():
                yield _document(stripped, piece, begin, text_key)
            begin += len(line)


def _document(line: bytes, piece: Piece, begin: int, text_key: str) -> str:
    try:
        record = json.loads(_text(line, piece.path, begin))
    except (ValueError, RecursionError) as wrong:
        where = _where(piece, begin)
        raise InputError(f"{where}: no JSON: {wrong}", hint="mend the line, or take it out") from wrong
    wanted = "each line must be an object with its text under that key; --text-key names another"
    if not isinstance(record, dict):
        what = f"a {type(record).__name__}, no object"
        raise InputError(f"{_where(piece, begin)}: {what}", hint=wanted)
    if text_key not in record:
        hint = f"{nearest_name(text_key, record)} {wanted}"
        raise InputError(f"{_where(piece, begin)}: no key {text_key!r}", hint=hint)
    if not isinstance(text := record[text_key], str):
        what = f"{text_key!r} is {json.dumps(text)[:40]}, no text"
        raise InputError(f"{_where(piece, begin)}: {what}", hint=wanted)
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        what = f"{text_key!r} has half of a pair, \\u{ord(text[wrong.start]):04x}, which is no character"
        raise InputError(f"{_where(piece, begin)}: {what}", hint="mend the line, or take it out") from wrong
    return text


def _where(piece: Piece, begin: int) -> str:
    """File and line of a byte; the lines before are counted only when there is something wrong."""
    with Path(piece.path).open("rb") as file:
        lines, left = 1, begin
        while left and (block := file.read(min(left, 1 << 20))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{piece.path}:{lines}"
