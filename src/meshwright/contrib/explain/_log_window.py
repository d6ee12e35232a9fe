"""Find an out-of-memory error in a log of any length, and return the lines around it.

A log is read once, in pieces, for sentences that such errors have; then only the part around the best of them
is read again. A sentence with a list of buffers is better than the error, and that better than a warning. Of
several as good the first counts: later ones are those of other ranks, and of attempts that follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import BinaryIO

PIECE = 2**22
BEFORE, AFTER = 2**16, 2**19
LISTS = (b"Peak buffers:", b"Largest program allocations in")
ERRORS = (
    b"Tried to allocate",
    b"Ran out of memory in memory space",
    b"ran out of memory in memory space",
    b"ut of memory while trying to allocate",
    b"exceeds available HBM",
    b"exceeding available bytes",
    b"That was not possible. There",
    b"would exceed memory (size=",
    b"Failed to allocate request for",
    b"you tried to allocate",
)
WARNINGS = (
    b"ran out of memory trying to allocate",
    b"RESOURCE_EXHAUSTED",
    b"CUDA_ERROR_OUT_OF_MEMORY",
    b"CUDA error: out of memory",
)
KILLED = (b"Out of memory: Killed process", b"oom-kill:", b"OOMKilled")
RANKED = (LISTS, ERRORS, WARNINGS, KILLED)
_LONGEST = max(len(mark) for marks in RANKED for mark in marks)
_ESCAPED = (
    3  # line ends that are written as two characters in one line: a message as a program prints its repr
)
_PREFIX = re.compile(r"\s*(?:\[[\w.,:/-]{1,40}\](?:<\w+>)?:? ?|\d{1,6}: )")
"""What a launcher writes before each line of a rank: "[rank3]: ", "[default0]:", "3: "."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of a log around an error. `at`: where the error is in `text`. `line`: its number in the log.

    `times`: how often such a sentence is in the whole log.
    """

    text: str
    at: int
    line: int
    times: int


def window_in(log: BinaryIO) -> Window | None:
    """Return the part of a log around its out-of-memory error; None if it has none."""
    found = _found(log)
    for marks in RANKED:
        places = [found[mark] for mark in marks if mark in found]
        if places:
            first = min(places)
            return _around(log, first[0], first[1], sum(times for _, _, times in places))
    return None


def _found(log: BinaryIO) -> dict[bytes, tuple[int, int, int]]:
    """Return for each sentence where it is first, in which line, and how often."""
    found: dict[bytes, tuple[int, int, int]] = {}
    offset = lines = 0
    kept = b""
    while piece := log.read(PIECE):
        text = kept + piece
        start = offset - len(kept)
        end = len(text) - _LONGEST + 1  # a mark that begins later is in the next piece whole
        is_last = len(piece) < PIECE
        for mark in (mark for marks in RANKED for mark in marks):
            place = text.find(mark)
            while place >= 0 and (place < end or is_last):
                if mark in found:
                    first, line, times = found[mark]
                    found[mark] = first, line, times + 1
                else:
                    found[mark] = start + place, lines + text.count(b"\n", 0, place) + 1, 1
                place = text.find(mark, place + 1)
        offset += len(piece)
        kept = text[max(0, end) :] if not is_last else b""
        lines += text.count(b"\n", 0, len(text) - len(kept))
    return found


def _around(log: BinaryIO, place: int, line: int, times: int) -> Window:
    """Return the lines around a place, of one rank if the launcher names it, with escapes resolved."""
    begin = max(0, place - BEFORE)
    log.seek(begin)
    before = log.read(place - begin).decode("utf-8", "replace")
    after = log.read(AFTER).decode("utf-8", "replace")
    here = before[before.rfind("\n") + 1 :] + after.partition("\n")[0]
    if here.count("\\n") >= _ESCAPED:
        before, after = _unescaped(before), _unescaped(after)
        here = before[before.rfind("\n") + 1 :] + after.partition("\n")[0]
    if prefix := _PREFIX.match(here):
        before, after = _of_rank(before, prefix[0]), _of_rank(after, prefix[0], is_first=True)
    return Window(text=before + after, at=len(before), line=line, times=times)


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"').replace("\\'", "'")


def _of_rank(text: str, prefix: str, *, is_first: bool = False) -> str:
    """Return the lines of one rank without its prefix. `is_first`: whether the text begins within a line."""
    kept = prefix.strip()
    lines = text.split("\n")
    head = [lines.pop(0)] if is_first else []
    return "\n".join([*head, *(_without(line, kept) for line in lines if line.lstrip().startswith(kept))])


def _without(line: str, prefix: str) -> str:
    return line.lstrip()[len(prefix) :].removeprefix(" ")


_FRAME = re.compile(r'File "([^"\n]{1,500})", line (\d{1,9}), in ([^\n]{1,200})')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ", "/lib/python3", "importlib/_bootstrap")


def is_own(file: str) -> bool:
    """Return whether a file of a frame is the user's: in no installed library."""
    return not any(part in file for part in _LIBRARIES)


def place_words(file: str, line: int) -> str:
    """Return a place in a source as "model.py:25"."""
    return f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line}"


def failed_at(window: Window) -> tuple[str, str]:
    """Return the place and function of the user's innermost frame in the traceback before an error; else "".

    Only lines that follow the last "Traceback" count.
    """
    start = window.text.rfind("Traceback (most recent call last)", 0, window.at)
    if start < 0:
        return "", ""
    frames = [match.groups() for match in _FRAME.finditer(window.text, start, window.at)]
    own = [frame for frame in frames if is_own(frame[0])] or frames
    if not own:
        return "", ""
    file, line, function = own[-1]
    return place_words(file, int(line)), function.strip()
