"""Read files that others wrote: never a pipe or a device, never more than a limit, never beyond a folder.

Every file that a user names, or that came with a model, a trace or a data set, is opened by `open_file`.
What cannot be read raises `OSError`, and what has another format `ValueError`. Their words end a sentence;
the caller says which file it is and what to do.

Imports: the standard library. Used by: all packages that read a file which Meshwright did not write.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import stat
import tomllib
import zlib
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20
MOST_JSON_BYTES = 100 * MEBIBYTE  # the index of a model with a million arrays has as many
MOST_TOML_BYTES = MEBIBYTE
MOST_SOURCE_BYTES = 16 * MEBIBYTE  # of a program
MOST_RECORD_BYTES = 2**31  # of what a run writes about itself; a line for each step
MOST_DOTS = 1000  # in a line of TOML: its reader takes time by the square of the parts of a dotted key
DEEPEST = 100  # levels of lists and objects
MOST_DIGITS = 300  # an integer of more is beyond every float
MOST_PACKED = 200  # times as many bytes as in the compressed file; real traces have up to 40
ALWAYS_UNPACKED = 64 * MEBIBYTE
TAIL_BYTES, LONGEST_LINE = 2**18, 500  # of what a process printed
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # without a way back: linear in its text
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def reason(error: Exception) -> str:
    """Return why a file could not be read, to follow a colon: without the system's number and the path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def open_file(path: Path | str) -> BufferedReader:
    """Open a regular file to read its bytes.

    Raises:
        OSError: there is no such file, or it is a folder, a pipe or a device, or its name is no name.
    """
    try:
        _check_kind(os.stat(path).st_mode, path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as wrong:  # a zero byte, or half a character
        raise OSError(errno.EINVAL, f"it is no name of a file ({wrong})", repr(str(path))[:200]) from None
    try:
        _check_kind(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check_kind(mode: int, path: Path | str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))


def read_bytes(path: Path | str, most: int) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes.

    Raises:
        OSError: as `open_file`; or the file is larger.
    """
    with open_file(path) as file:
        return _at_most(file, most, path)


def _at_most(file: BufferedReader | gzip.GzipFile, most: int, path: Path | str) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def read_text(path: Path | str, most: int = MOST_JSON_BYTES) -> str:
    """Return the text of a file in UTF-8, with Unix's ends of lines and without the mark of Windows' editors.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is not UTF-8.
    """
    text = read_bytes(path, most).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_gzip(path: Path | str, most: int) -> bytes:
    """Return what a file of gzip holds, of at most `most` bytes.

    Raises:
        OSError: as `open_file`; or it holds more, or far more than any real file of its size.
        ValueError: it is no whole file of gzip.
    """
    with open_file(path) as packed:
        usual = max(MOST_PACKED * os.fstat(packed.fileno()).st_size, ALWAYS_UNPACKED)
        try:
            with gzip.GzipFile(fileobj=packed) as file:
                return _at_most(file, min(most, usual), path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as broken:
            raise ValueError(f"it is no whole gzip file: {broken}") from None


def parsed_json(text: str | bytes, *, strict: bool = True) -> Any:
    """Return the value of a JSON text, at most `DEEPEST` levels deep.

    Args:
        strict: refuse names that are given twice and halves of surrogate pairs, which Python's reader takes.
            Not for lines of data and traces, whose other fields are not ours to judge.

    Raises:
        ValueError: the text is not such JSON, in words that follow a colon.

    >>> parsed_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> parsed_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the name 'a' is given twice
    """
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    words = text if isinstance(text, str) else text.decode("utf-8-sig")
    if (depth := _depth(content)) > DEEPEST:
        raise ValueError(f"it is nested {depth} levels deep, and {DEEPEST} are read")
    if not strict:
        return json.loads(words, parse_int=_whole)
    value = json.loads(words, parse_int=_whole, object_pairs_hook=_named)
    if _HALF_PAIR.search(words):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as half:
            wrong = f"\\u{ord(half.object[half.start]):04x}"
            raise ValueError(f"it has half of a pair, {wrong}, which is not a character") from None
    return value


def json_value_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place of a text, and where it ends: for texts read in parts.

    Names that are given twice are taken, and signs that JSON wants escaped.

    Raises:
        ValueError: there is no such value, or it is nested more than `DEEPEST` levels deep.

    >>> json_value_at('[1, {"a": 2}]', 4)
    ({'a': 2}, 12)
    """
    try:
        value, end = _READER.raw_decode(text, at)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    if text.count("[", at, end) + text.count("{", at, end) > DEEPEST:
        depth = _depth(text[at:end].encode("utf-8", "surrogatepass"))
        if depth > DEEPEST:
            raise ValueError(f"it is nested {depth} levels deep, and {DEEPEST} are read")
    return value, end


def _depth(content: bytes) -> int:
    if content.count(b"[") + content.count(b"{") <= DEEPEST:
        return 0
    depth = deepest = 0
    for bracket in _STRING.sub(b"", content).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, and {MOST_DIGITS} are read")
    return int(digits)


_READER = json.JSONDecoder(parse_int=_whole, strict=False)


def _named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice[:100]!r} is given twice")
    return table


def read_json(path: Path | str, most: int = MOST_JSON_BYTES, *, strict: bool = True) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: as `read_bytes`.
        ValueError: as `parsed_json`.
    """
    return parsed_json(read_text(path, most), strict=strict)


def parsed_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        ValueError: the text is not TOML, or has more than `MOST_DOTS` dots in a line.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > MOST_DOTS:
            raise ValueError(f"line {number} has {line.count('.'):,} dots, and {MOST_DOTS:,} are read")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: Path | str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        OSError: as `read_bytes`.
        ValueError: as `parsed_toml`.
    """
    return parsed_toml(read_text(path, MOST_TOML_BYTES))


def within(folder: Path, name: object) -> Path:
    """Return the path of a file that another file of the same folder names.

    A link at that place may lead elsewhere: a cache of models keeps its files so.

    Raises:
        ValueError: the name is no text, or leads out of the folder.

    >>> within(Path("model"), "part-1.safetensors").as_posix()
    'model/part-1.safetensors'
    >>> within(Path("model"), "../secret")
    Traceback (most recent call last):
    ValueError: '../secret' is not the name of a file in its folder
    """
    if isinstance(name, str) and name and not (name[0] == "/" or "\0" in name or ".." in name.split("/")):
        return folder / name
    raise ValueError(f"{str(name)[:100]!r} is not the name of a file in its folder")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of what a process printed that are not blank, without the rest of a long line.

    Reads the file's end alone: a process may print gigabytes, also in one line. Empty if the file is gone.
    """
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            words = file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line for line in words.splitlines() if line.strip()]
    return [
        line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..." for line in lines[-count:]
    ]
