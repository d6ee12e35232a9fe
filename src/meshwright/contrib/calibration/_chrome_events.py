"""Read the events of a file of Chrome's trace format one by one, so that a long trace takes little memory.

`torch.profiler` writes such files: an object with `traceEvents`, or only the list of them, perhaps packed by
gzip. A file may come from anywhere: its size, the depth of its objects and the length of its numbers are
limited, and each field is checked when it is asked for.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import ALWAYS_UNPACKED, MOST_PACKED, json_value_at, open_file, reason
from meshwright.hardware import LONGEST_STEP_SECONDS

MICROSECOND = 1e-6
HINT = "give an .xplane.pb file, a folder that jax.profiler wrote, or a .json or .json.gz of torch.profiler"
AGAIN = "trace again, a few whole steps; or give the seconds of a step: --measured"
MOST_JSON_BYTES = 2**31  # an hour of a busy host; ten steps have some MB
MOST_GZIP_BYTES = 2**29  # of them packed, to a tenth; zeros behind the end are passed over one by one
CHUNK_BYTES = 2**22
MOST_VALUE_LETTERS = 2**26  # of one event, or of one field beside the events
LONGEST_WORD = 400  # of a number or a constant, beyond which what is broken is not only cut off
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class ChromeTrace:
    """A file of Chrome's events: iterate over it, each event once.

    `about`: the fields of the file beside its events, such as `distributedInfo`; whole after the last event.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict[str, Any])

    def __iter__(self) -> Iterator[ChromeEvent]:
        """Yield the events.

        Raises:
            InputError: the file is none of Chrome's events, is cut short, or is larger than the limits.
        """
        try:
            with open_file(self.path) as file:
                for place, fields in enumerate(_Text(file, self.path).events(self.about)):
                    yield ChromeEvent(self.path, place, fields)
        except (OSError, ValueError) as broken:
            what = f"{self.path} cannot be read as Chrome trace events: {reason(broken)}"
            raise InputError(what, hint=HINT) from broken


class ChromeEvent:
    """One event, whose fields are checked when they are read.

    Raises:
        InputError: from each method: a field is of another kind than Chrome's events have.
    """

    __slots__ = ("_fields", "_path", "_place")

    def __init__(self, path: Path, place: int, fields: Any) -> None:
        self._path, self._place, self._fields = path, place, fields
        if not isinstance(fields, dict):
            raise InputError(f"{self._where} is {shown(fields)}, not an object", hint=AGAIN)

    @property
    def _where(self) -> str:
        return f"{self._path}: event {self._place}"

    @property
    def where(self) -> str:
        """The place of the event in words, with its name."""
        return f"{self._where}, {self.text('name')[:100]!r}"

    def text(self, key: str) -> str:
        """Return a field that is text; "" if it is not there."""
        value = self._fields.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise InputError(f"{self._where}: {key} = {shown(value)} is not text", hint=AGAIN)
        return value

    @property
    def args(self) -> Mapping[str, Any]:
        """The arguments of the event, whose own values are not checked."""
        args = self._fields.get("args", {})
        if not isinstance(args, dict):
            raise InputError(f"{self.where}: args = {shown(args)} is not an object", hint=AGAIN)
        return args

    @property
    def begin_seconds(self) -> float:
        """When the event began, on the clock of the trace."""
        return self._number("ts") * MICROSECOND

    @property
    def seconds(self) -> float:
        """How long the event took."""
        return possible_seconds(self._number("dur") * MICROSECOND, self.where)

    @property
    def name(self) -> str:
        """The name of an event that must have one."""
        name = self.text("name")
        if not name:
            raise InputError(f"{self._where}: a {self.text('cat') or 'event'} without a name", hint=AGAIN)
        return name

    @property
    def device(self) -> str:
        """The device of a kernel."""
        device = self.args.get("device", self._fields.get("pid"))
        if not isinstance(device, int | str):
            raise InputError(f"{self.where}: its device (or pid) is {shown(device)}", hint=AGAIN)
        return str(device)

    def identity(self, key: str) -> str:
        """Return a field that is a number or text and names something, such as `tid`; "" if it is absent."""
        value = self._fields.get(key, "")
        if not isinstance(value, int | str):
            raise InputError(f"{self.where}: its {key} is {shown(value)}", hint=AGAIN)
        return str(value)

    def _number(self, key: str) -> float:
        value = self._fields.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            absent = key not in self._fields
            what = "is missing" if absent else f"= {shown(value)} is no number of microseconds"
            raise InputError(f"{self.where}: {key} {what}", hint=AGAIN)
        return float(value)


def possible_seconds(seconds: float, where: str) -> float:
    """Return the seconds of an event.

    Raises:
        InputError: no event takes that long, or less than nothing.
    """
    if not 0 <= seconds <= LONGEST_STEP_SECONDS:
        raise InputError(f"{where} takes {seconds:.3g} s, which cannot be", hint=AGAIN)
    return seconds


def shown(value: object) -> str:
    """Return a value as an error shows it."""
    return repr(value)[:40]


class _Text:
    """The text of a file, of which only what is being read is held."""

    def __init__(self, file: Any, path: Path) -> None:
        self._most = MOST_JSON_BYTES
        if path.name.endswith(".gz"):
            packed = os.fstat(file.fileno()).st_size
            if packed > MOST_GZIP_BYTES:
                raise OSError(f"it has more than {MOST_GZIP_BYTES:,} packed bytes; trace fewer steps")
            self._most = min(self._most, max(MOST_PACKED * packed, ALWAYS_UNPACKED))
            file = gzip.GzipFile(fileobj=file)
        self._file, self._path = file, path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._held, self._at, self._read = "", 0, 0

    def events(self, about: dict[str, Any]) -> Iterator[Any]:
        """Yield what `traceEvents` holds, and put all other fields into `about`."""
        found = False
        if self._next() == "[":
            yield from self._items()
            found = True
        elif self._next() == "{":
            for name in self._names():
                if name != "traceEvents":
                    about[name] = self._value()
                    continue
                if self._next() != "[":
                    raise ValueError(f"its traceEvents are {shown(self._value())}, not a list")
                found = True
                yield from self._items()
        if not found:
            raise ValueError("it has no list of traceEvents")
        if self._next():
            raise ValueError(f"{shown(self._held[self._at : self._at + 40])} is behind its end")

    def _items(self) -> Iterator[Any]:
        self._at += 1
        while (sign := self._next()) != "]":
            yield self._value()
            sign = self._next()
            if sign not in (",", "]"):
                raise ValueError(self._cut_or("a comma or ] is missing", sign))
            self._at += sign == ","
        self._at += 1

    def _names(self) -> Iterator[str]:
        self._at += 1
        while (sign := self._next()) != "}":
            name = self._value()
            if not isinstance(name, str) or self._next() != ":":
                raise ValueError(self._cut_or("a name and a colon are missing", self._next()))
            self._at += 1
            yield name
            sign = self._next()
            if sign not in (",", "}"):
                raise ValueError(self._cut_or("a comma or } is missing", sign))
            self._at += sign == ","
        self._at += 1

    def _cut_or(self, what: str, sign: str) -> str:
        return what if sign else "it is cut short"

    def _next(self) -> str:
        """Return the next letter that is no space; "" at the end of the file."""
        while True:
            self._at = _SPACE.match(self._held, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more():
                return ""

    def _value(self) -> Any:
        """Return the next value, for which as much is read as it takes."""
        self._next()
        while True:
            try:
                value, end = json_value_at(self._held, self._at)
                if end < len(self._held) or not self._more(len(self._held) - self._at):
                    self._at = end
                    return value
            except json.JSONDecodeError as broken:
                held, behind = len(self._held) - self._at, len(self._held) - broken.pos
                if behind > LONGEST_WORD and not broken.msg.startswith("Unterminated string"):
                    raise ValueError(f"{broken.msg}: {shown(self._held[broken.pos :][:40])}") from broken
                if held > MOST_VALUE_LETTERS:
                    raise ValueError(f"one value has more than {MOST_VALUE_LETTERS:,} letters") from broken
                if not self._more(held):
                    raise ValueError(f"it is cut short: {broken.msg}") from broken

    def _more(self, held: int = 0) -> bool:
        """Read on, at least as much as is held, so that a long value takes time in proportion to it."""
        try:
            content = self._file.read(max(CHUNK_BYTES, held))
        except (gzip.BadGzipFile, EOFError, zlib.error) as broken:
            raise ValueError(f"it is no whole gzip file: {broken}") from None
        self._read += len(content)
        if self._read > self._most:
            raise OSError(f"it has more than {self._most:,} bytes; trace fewer steps")
        self._held = self._held[self._at :] + self._decode(content, not content)
        self._at = 0
        return bool(content)
