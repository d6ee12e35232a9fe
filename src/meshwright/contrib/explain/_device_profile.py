"""Read a memory profile of JAX: which arrays and programs a device holds, by the frame of the user's source.

`jax.profiler.save_device_memory_profile` writes pprof's format: a protocol buffer, compressed by gzip. The
samples (their values, frames and labels), locations, functions and texts are read, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import usable_bytes
from meshwright.units import format_bytes

from ._explanation import MOST_BYTES, Explanation, Held, Setting, summed
from ._log_window import is_own, place_words

KIND = "memory profile of JAX"
HINT = "give the file of jax.profiler.save_device_memory_profile(FILE)"
MOST_FIELDS = 5_000_000
MOST_FRAMES = 1000  # of one sample
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _TEXT = 1, 2, 4, 5, 6  # fields of a profile
_VARINT, _WIDE, _LENGTH, _NARROW = 0, 1, 2, 5  # kinds of field
_Fields = dict[int, list["int | bytes"]]


class _Odd(ValueError):
    """A profile that is not what JAX writes, in words that follow a colon."""


def device_profile(path: Path, content: bytes, on: Fleet | None = None) -> Explanation:
    """Return what a profile says, compared with the memory of a device of `on`.

    Raises:
        InputError: it is no profile of memory.
    """
    try:
        return _Profile(content).explanation(str(path), on)
    except _Odd as wrong:
        what = f"{path} cannot be read as a memory profile of JAX: {wrong}"
        raise InputError(what, hint=HINT) from None


class _Profile:
    def __init__(self, content: bytes) -> None:
        self._num_fields = 0
        fields = self._fields(content)
        self._texts = [_bytes(each).decode("utf-8", "replace") for each in fields.get(_TEXT, [])]
        self._functions = {
            _whole(each, 1): (self._text(_whole(each, 2)), self._text(_whole(each, 4)))
            for each in map(self._message, fields.get(_FUNCTION, []))
        }
        self._locations = {
            _whole(each, 1): self._line(each) for each in map(self._message, fields.get(_LOCATION, []))
        }
        types = [
            (self._text(_whole(each, 1)), self._text(_whole(each, 2)))
            for each in map(self._message, fields.get(_SAMPLE_TYPE, []))
        ]
        if ("space", "bytes") not in types:
            raise _Odd(f"its samples are of {types[:4]}, and none is of bytes")
        self._at = types.index(("space", "bytes"))
        self._samples = [self._message(each) for each in fields.get(_SAMPLE, [])]

    def explanation(self, path: str, on: Fleet | None) -> Explanation:
        """Return the explanation of the fullest device."""
        by_device: dict[str, list[Held]] = {}
        for sample in self._samples:
            device, held = self._held(sample)
            if held.num_bytes:
                by_device.setdefault(device, []).append(held)
        programs = by_device.pop("", [])
        totals = {device: sum(each.num_bytes for each in held) for device, held in by_device.items()}
        fullest = max(totals, key=lambda device: totals[device], default="")
        held = summed(iter([*by_device.get(fullest, []), *programs]))
        parts = {f"arrays on {device}": total for device, total in totals.items()}
        if code := sum(each.num_bytes for each in programs):
            parts["programs"] = code
        total = totals.get(fullest, 0) + code
        where = f" on {fullest}" if fullest else ""
        usable = None if on is None else usable_bytes(on)
        of = "" if usable is None else f" of {format_bytes(usable)}"
        return Explanation(
            path=path,
            kind=KIND,
            lead=f"JAX held {format_bytes(total)}{of}{where} when the profile was written",
            needed_bytes=total,
            usable_bytes=usable,
            missing_bytes=None if usable is None else total - usable,
            parts=parts,
            held=held,
            held_of="what was held, by the line that made it",
            settings=(
                Setting(
                    change="meshwright weigh module.py:step --on FLEET",
                    saved_bytes=None,
                    why="a profile has the arrays that exist between steps: weighing has what a step "
                    "needs besides",
                ),
            ),
            notes=("an array counts where it was made, as long as anything refers to it",),
        )

    def _held(self, sample: _Fields) -> tuple[str, Held]:
        """Return the device and what one sample holds there; "" is the device of a program."""
        values = self._numbers(sample.get(2, []))
        size = values[self._at] if self._at < len(values) else 0
        if size > MOST_BYTES:
            raise _Odd(f"a sample has {size:,} bytes")
        count = values[0] if len(values) > 1 else 1
        labels = {
            self._text(_whole(each, 1)): self._text(_whole(each, 2))
            for each in map(self._message, sample.get(3, []))
        }
        frames = [
            self._locations[n] for n in self._numbers(sample.get(1, []))[:MOST_FRAMES] if n in self._locations
        ]
        kind = labels.get("kind", "")
        place, function = _place(frames)
        what = {"buffer": "array", "executable": "program"}.get(kind, kind or "allocation")
        held = Held(
            num_bytes=size,
            what=f"{count:,} {what}{'s' if count != 1 else ''}",
            place=place,
            category={"buffer": "arrays", "executable": "programs"}.get(kind, kind),
            module=function,
        )
        return labels.get("device", "") if kind != "executable" else "", held

    def _line(self, location: _Fields) -> tuple[str, str, int]:
        """Return the file, function and line of a location."""
        if 4 not in location:
            return "", "", 0
        line = self._message(location[4][0])
        function, file = self._functions.get(_whole(line, 1), ("", ""))
        return file, function, _whole(line, 2)

    def _text(self, number: int) -> str:
        if number >= len(self._texts):
            raise _Odd(f"it names text {number:,} of {len(self._texts):,}")
        return self._texts[number]

    def _numbers(self, values: list[int | bytes]) -> list[int]:
        """Return repeated integers, which are one by one or packed into bytes."""
        made: list[int] = []
        for each in values:
            if isinstance(each, int):
                made.append(each)
                continue
            place = 0
            while place < len(each):
                number, place = _varint(each, place)
                made.append(number)
                self._count()
        return made

    def _message(self, content: int | bytes) -> _Fields:
        return self._fields(_bytes(content))

    def _fields(self, content: bytes) -> _Fields:
        found: _Fields = {}
        for number, value in self._every(content):
            found.setdefault(number, []).append(value)
        return found

    def _every(self, content: bytes) -> Iterator[tuple[int, int | bytes]]:
        """Yield the number and value of each field of a message."""
        place = 0
        while place < len(content):
            self._count()
            tag, place = _varint(content, place)
            kind = tag & 7
            if kind == _VARINT:
                value, place = _varint(content, place)
                yield tag >> 3, value
                continue
            length = {_WIDE: 8, _NARROW: 4}.get(kind)
            if kind == _LENGTH:
                length, place = _varint(content, place)
            if length is None or place + length > len(content):
                raise _Odd(f"a field of kind {kind} ends beyond byte {len(content):,}")
            if kind == _LENGTH:
                yield tag >> 3, content[place : place + length]
            place += length

    def _count(self) -> None:
        self._num_fields += 1
        if self._num_fields > MOST_FIELDS:
            raise _Odd(f"it has more than {MOST_FIELDS:,} fields")


def _place(frames: list[tuple[str, str, int]]) -> tuple[str, str]:
    """Return the place and function of the innermost frame in the user's source, else of the innermost."""
    for file, function, line in [each for each in frames if is_own(each[0])] or frames:
        return place_words(file, line), function
    return "", ""


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Return the integer at a place, seven bits a byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(content):
            raise _Odd("it ends within a number")
        value |= (content[place] & 0x7F) << shift
        place += 1
        if not content[place - 1] & 0x80:
            return value, place
    raise _Odd("a number has more than ten bytes")


def _whole(fields: _Fields, number: int) -> int:
    """Return an integer field, 0 where it is absent."""
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise _Odd(f"field {number} is no number")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise _Odd("a message is a number")
    return value
