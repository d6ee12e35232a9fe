"""Find the texts to tokenize, and convert between text and token ids.

A file whose name ends in `.jsonl` or `.ndjson` holds one JSON object per line, each a document; blank lines
are skipped. A row of a `.parquet` file is a document (`_parquet`). Any other file is one document. A folder
stands for the files in and below it whose names end in one of these or in `.txt`. A piece of work is a whole
file, or the lines or the groups of rows that begin in a byte range of a long one.

Token ids are bytes, or come from a `tokenizer.json` through Hugging Face's package `tokenizers`, which is
imported only then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError, nearest_name
from meshwright.extras import how_to_install
from meshwright.files import MOST_JSON_BYTES, open_file, parsed_json, read_bytes, reason
from meshwright.trainer.data import BYTES, ByteTokenizer

from ._parquet import PARQUET, parquet_texts

LINES = (".jsonl", ".ndjson")
_IN_FOLDERS = (*LINES, PARQUET, ".txt")
PIECE_BYTES = 1 << 24
MOST_LINE_BYTES = 1 << 28
_BLOCK_BYTES = 1 << 20
_LONGEST_CHARACTER = 4  # bytes
_CONTEXT = 2048  # characters on either side of a place that decide its tokens: no word is as long
_TRIES = 8
_BETWEEN = re.compile(r"(?<=\S)\s")  # before the space behind a word
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """Bytes `start` to `stop` of an input; `modified_ns` shows whether the file has changed since."""

    path: str
    num_bytes: int
    modified_ns: int
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """True if the piece is the whole file."""
        return self.stop - self.start == self.num_bytes


def pieces_of(inputs: Sequence[str], piece_bytes: int) -> list[TextPiece]:
    """Split the inputs into pieces of work, in their order."""
    if not inputs:
        raise InputError("no text was named", hint="name one file or several")
    pieces: list[TextPiece] = []
    seen: dict[Path, str] = {}
    for name in (each for text in inputs for each in _files_of(text)):
        path = Path(name)
        if not os.path.exists(name):
            raise InputError(f"no text {name}", hint="check the path")
        try:
            open_file(name).close()
        except OSError as refused:
            raise InputError(
                f"cannot read {name}: {reason(refused)}", hint="name a file of text"
            ) from refused
        if (real := path.resolve()) in seen:
            raise InputError(f"{name} is named twice (as {seen[real]})", hint="name each file once")
        seen[real] = name
        num_bytes, modified_ns = path.stat().st_size, path.stat().st_mtime_ns
        if num_bytes == 0:
            raise InputError(f"{name} is empty", hint="leave it out")
        size = piece_bytes if path.suffix in (*LINES, PARQUET) else num_bytes
        whole = TextPiece(path=name, num_bytes=num_bytes, modified_ns=modified_ns, start=0, stop=num_bytes)
        pieces += [
            replace(whole, start=start, stop=min(start + size, num_bytes))
            for start in range(0, num_bytes, size)
        ]
    return pieces


def _files_of(text: str) -> list[str]:
    """Return the texts of a folder, sorted by path, or the file itself."""
    if not os.path.isdir(text):
        return [text]
    found = sorted(path for path in Path(text).rglob("*") if path.suffix in _IN_FOLDERS and path.is_file())
    if not found:
        raise InputError(
            f"{text} is a folder without a file that ends in {', '.join(_IN_FOLDERS)}",
            hint=f"name its files, as in {text.rstrip('/')}/*",
        )
    return [str(path) for path in found]


def fragments_in(piece: TextPiece, text_key: str, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield the documents of a piece, in order, each with True; a long one in fragments, the last with True.

    The fragments' ids, one after another, are those of the document. A file that is one document is read so,
    in little memory.
    """
    path = Path(piece.path)
    try:
        if path.suffix in LINES:
            yield from ((text, True) for text in _lines(piece, text_key))
        elif path.suffix == PARQUET:
            yield from ((text, True) for text in parquet_texts(path, piece.start, piece.stop, text_key))
        elif isinstance(tokenizer, ByteTokenizer):
            yield from _blocks(piece)
        else:
            yield from _divided(piece, tokenizer)
    except OSError as refused:
        raise InputError(f"cannot read {path}: {reason(refused)}", hint="check its permissions") from refused


def _divided(piece: TextPiece, tokenizer: FileTokenizer) -> Iterator[tuple[str, bool]]:
    """Yield a file of text in fragments that `tokenizer` can take one by one, as far as it can be divided."""
    held: list[str] = []
    tries = 0
    for block, is_last in _blocks(piece):
        held.append(block)
        if is_last or tries == _TRIES:
            continue
        text = "".join(held)
        if place := tokenizer.place_to_divide(text):
            yield text[:place], False
            held, tries = [text[place:]], 0
        else:
            tries += 1
    yield "".join(held), True


def _blocks(piece: TextPiece) -> Iterator[tuple[str, bool]]:
    """Yield a file of text in blocks of whole characters, and for each whether it is the last."""
    with open_file(piece.path) as file:
        first_byte, rest, block = 0, b"", file.read(_BLOCK_BYTES)
        while block:
            content, block = rest + block, file.read(_BLOCK_BYTES)
            whole = _whole_characters(content) if block else len(content)
            yield _text(content[:whole], piece.path, first_byte), not block
            first_byte, rest = first_byte + whole, content[whole:]


def _whole_characters(content: bytes) -> int:
    """Return how many bytes come before a character of UTF-8 that the end may have cut."""
    for place in range(len(content) - 1, max(len(content) - _LONGEST_CHARACTER, 0) - 1, -1):
        if content[place] & 0b1100_0000 != 0b1000_0000:  # not one that goes on
            return place if content[place] & 0b1000_0000 else place + 1
    return len(content)


def _text(content: bytes, where: str, first_byte: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as wrong:
        starts = [kind for magic, kind in _COMPRESSED.items() if content.startswith(magic)]
        hint = "convert it, as iconv -t utf-8 does"
        if starts and not first_byte:
            hint = f"it is compressed by {starts[0]}; unpack it first"
        what = f"byte {first_byte + wrong.start} (0x{content[wrong.start]:02x}) is not UTF-8"
        raise InputError(f"{where}: {what}", hint=hint) from wrong


def _lines(piece: TextPiece, text_key: str) -> Iterator[str]:
    with open_file(piece.path) as file:
        begin = piece.start
        if begin:  # a line that began earlier belongs to the previous piece
            file.seek(begin - 1)
            while part := file.readline(_BLOCK_BYTES):
                begin += len(part)
                if part.endswith(b"\n"):
                    break
            begin -= 1
        while begin < piece.stop and (line := file.readline(MOST_LINE_BYTES + 1)):
            if len(line) > MOST_LINE_BYTES:
                what = f"{_where(piece, begin)}: the line has more than {MOST_LINE_BYTES:,} bytes"
                raise InputError(what, hint="divide it, or name the file .txt if it is one text")
            if stripped := line.rstrip():
                yield _document(stripped, piece, begin, text_key)
            begin += len(line)


def _document(line: bytes, piece: TextPiece, begin: int, text_key: str) -> str:
    def wrong(what: str, hint: str) -> InputError:
        return InputError(f"{_where(piece, begin)}: {what}", hint=hint)

    repair = "correct the line, or take it out"
    wanted = "each line must be an object with its text under that key; --text-key names another"
    try:
        record = parsed_json(_text(line, piece.path, begin), strict=False)
    except ValueError as error:
        raise wrong(f"not JSON: {error}", repair) from error
    if not isinstance(record, dict):
        raise wrong(f"a {type(record).__name__}, not an object", wanted)
    if text_key not in record:
        raise wrong(f"no key {text_key!r}", f"{nearest_name(text_key, record)} {wanted}")
    if not isinstance(text := record[text_key], str):
        raise wrong(f"{text_key!r} is {json.dumps(text)[:40]}, not text", wanted)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise wrong(f"{text_key!r} has half of a pair, {half}, which is not a character", repair) from error
    return text


def _where(piece: TextPiece, begin: int) -> str:
    """Return the file and line of a byte; counts the lines before it, which only error messages need."""
    with open_file(piece.path) as file:
        lines, left = 1, begin
        while left and (block := file.read(min(left, 1 << 20))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{piece.path}:{lines}"


_NAME_ANOTHER = "name another tokenizer.json, or use bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTokenizer:
    """The tokenizer of a `tokenizer.json`, without special tokens around a text and without truncation."""

    name: str
    sha256: str
    num_ids: int
    inner: Any

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        encoded = self._of_rust(lambda: self.inner.encode_batch(list(texts), add_special_tokens=False))
        return [np.array(one.ids, np.uint32) for one in encoded]

    def placed(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, and the character at which each begins."""
        encoded = self._of_rust(lambda: self.inner.encode(text, add_special_tokens=False))
        return np.array(encoded.ids, np.int32), np.array([start for start, _ in encoded.offsets], np.int64)

    def place_to_divide(self, text: str) -> int:
        """Return a place near the text's end where its ids can be divided; 0 if there is none.

        It lies behind a word: words are divided before tokens are looked for in them. The ids about
        the place are compared with those of both sides by themselves.
        """
        if self.inner.pre_tokenizer is None:
            return 0
        last = len(text) - _CONTEXT
        found = [match.start() for match in _BETWEEN.finditer(text, max(last - _CONTEXT, 0), max(last, 0))]
        for place in found[: -_TRIES - 1 : -1]:
            start, stop = max(place - _CONTEXT, 0), place + _CONTEXT
            around, before, behind = self.encode([text[start:stop], text[start:place], text[place:stop]])
            if np.array_equal(around, np.concatenate([before, behind])):
                return place
        return 0

    def decode(self, ids: np.ndarray) -> str:
        """Return the text, with special tokens; ids without a token are left out."""
        text: str = self._of_rust(lambda: self.inner.decode(ids.tolist(), skip_special_tokens=False))
        return text

    def _of_rust(self, work: Callable[[], Any]) -> Any:
        """Call the package `tokenizers`, and word its errors.

        Raises:
            InputError: it fails, as a tokenizer does that has no token for an unknown word.
        """
        try:
            return work()
        except BaseException as failed:
            raise _words_of_rust(failed, f"the tokenizer {self.name} fails") from failed

    def end_of_document(self, name: str) -> int:
        """Return the id of a token, given as the token's text or as the id.

        Raises:
            InputError: no such token.
        """
        token_id: int | None = self.inner.token_to_id(name)
        if token_id is None and name.isdecimal() and len(name) < 20 and int(name) < self.num_ids:
            token_id = int(name)
        if token_id is None:
            special = [token.content for token in self.inner.get_added_tokens_decoder().values()]
            raise InputError(
                f"--end-of-document {name!r}: {self.name} has no such token and {self.num_ids} ids",
                hint=nearest_name(name, special),
            )
        return token_id


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer "bytes", or that of a local `tokenizer.json`.

    Raises:
        InputError: the file is missing or is no tokenizer, or the package `tokenizers` is not installed.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name)
    if not os.path.exists(name):
        raise InputError(f"no tokenizer {name!r}", hint="use bytes, or the path of a local tokenizer.json")
    try:
        import tokenizers
    except ImportError as missing:
        raise InputError(
            f"{name}: reading a tokenizer.json needs the package tokenizers, which is not installed",
            hint=f"{how_to_install('tokenizers')}, or use the tokenizer bytes",
        ) from missing
    try:
        content = read_bytes(path, MOST_JSON_BYTES)
        with _quiet_stderr():  # on which a panic of Rust prints
            inner: Any = tokenizers.Tokenizer.from_buffer(content)
    except OSError as refused:
        raise InputError(f"cannot read {name}: {reason(refused)}", hint=_NAME_ANOTHER) from refused
    except BaseException as failed:
        raise _words_of_rust(failed, f"{name} is not a tokenizer") from failed
    inner.no_truncation()  # the file may set truncation and padding, for use in a model
    inner.no_padding()
    num_ids = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids may have gaps
    if not num_ids:
        raise InputError(f"{name} is a tokenizer without tokens", hint=_NAME_ANOTHER)
    sha256 = hashlib.sha256(content).hexdigest()
    return FileTokenizer(name=path.name, sha256=sha256, num_ids=num_ids, inner=inner)


def tokenizer_path(name: str) -> str:
    """Return what `open_tokenizer` takes: "bytes", or the file `tokenizer.json`, which a folder may hold."""
    return str(Path(name, "tokenizer.json")) if name != BYTES and Path(name).is_dir() else name


def _words_of_rust(failed: BaseException, what: str) -> BaseException:
    """Return the error of the package `tokenizers` in words, or one that is not its own as it is.

    The package raises bare `Exception`; a panic of its Rust is a `BaseException`.
    """
    if isinstance(failed, Exception) or type(failed).__name__ == "PanicException":
        return InputError(f"{what}: {str(failed)[:300]}", hint=_NAME_ANOTHER)
    return failed


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Let nothing appear on the process's stderr within the block."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
