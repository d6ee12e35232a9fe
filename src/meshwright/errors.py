"""Define the errors of Meshwright, worded for the person who can act on them.

A user's mistake raises a `MeshwrightError`: what happened, with the values, and a computed hint.
A mistake in Meshwright itself fails an `assert`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

_OWN_FOLDER = __file__.rpartition("errors")[0]
# Control characters except tab and newline, halves of surrogate pairs, and marks of text direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` with its control characters escaped, so that a terminal does not obey them.

    For example, the sequence that would turn a terminal red becomes the text "\\x1b[31m".
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


_MOST_CHARACTERS = 10_000  # of a message


def _without_middle(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    kept = _MOST_CHARACTERS // 2
    return f"{text[:kept]}\n... {len(text) - 2 * kept:,} characters ...\n{text[-kept:]}"


class MeshwrightError(Exception):
    """An error that the user can act on; `exit_code` is the command line's exit status.

    Both texts may quote a user's exception or a file, so their control characters are escaped, and the middle
    of a very long one is left out.

    Args:
        message: what happened, with the values.
        hint: what to do next; computed from the values, never generic.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        self.message = printable(_without_middle(message))
        self.hint = printable(_without_middle(hint))
        super().__init__(f"{self.message}\n  hint: {self.hint}")

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the user's line, the message and the hint, without our own frames.

        IPython calls it in place of its own traceback.
        """
        import traceback

        frames = traceback.extract_tb(self.__traceback__)
        is_ours = [frame.filename.startswith(_OWN_FOLDER) for frame in frames]
        caller = frames[is_ours.index(True) - 1] if any(is_ours[1:]) else None
        place = [] if caller is None or not caller.line else [f"line {caller.lineno}: {caller.line}"]
        return [*place, f"{type(self).__name__}: {self.message}", f"  hint: {self.hint}"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with its hint, so that it can be sent from another process."""
        return partial(type(self), hint=self.hint), (self.message,)


EXIT_BROKE_OFF = 4
"""Status of a process that ended with an unforeseen error, or that hung: another attempt may succeed."""


class DeviceMemoryError(MeshwrightError):
    """A device had no memory left while a run was under way; another attempt may succeed."""

    exit_code = EXIT_BROKE_OFF


class InputError(MeshwrightError):
    """An error in the user's input: an unknown name, a size that does not divide."""

    exit_code = 2


class CompileError(MeshwrightError):
    """A failure of the compiler or of its worker; the message quotes it."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the start of a hint for an unknown `name`: similar known names, or all of `known`.

    Two names are similar if one starts with the other (three letters or more), or if few edits turn one into
    the other. An edit omits, adds or replaces a letter, or swaps it with its neighbour. The limit is one
    edit, or a quarter of the letters of `name` if that is more. Case does not matter.

    >>> nearest_name("tenosr", ["data", "tensor"])
    "did you mean 'tensor'?"
    """
    names = sorted(known)
    if close := near_names(name, names):
        return f"did you mean {' or '.join(map(repr, close))}?"
    return "known: " + ", ".join(names) if names else "none are known"


_MOST_NAMES = 4  # suggested at once
_LEAST_LETTERS = 3  # the shortest beginning that is compared


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the names in `known` that are similar to `name` (see `nearest_name`): only the most similar."""
    lower, limit, names = name.lower(), max(1, len(name) // 4), sorted(known)
    edits = {n: _num_edits(lower, n.lower()) for n in names if abs(len(n) - len(name)) <= limit}
    longer = [n for n in names if len(name) >= _LEAST_LETTERS and n.lower().startswith(lower)][:_MOST_NAMES]
    least = min(edits.values(), default=limit + 1)
    if least <= limit:
        close = [n for n, count in edits.items() if count == least]
        same_start = [n for n in close if n.lower().startswith(lower) or lower.startswith(n.lower())]
        return same_start[:1] or longer or close[:_MOST_NAMES]
    shorter = [n for n in names if len(n) >= _LEAST_LETTERS and lower.startswith(n.lower())]
    return longer or sorted(shorter, key=len)[-1:]


def _num_edits(one: str, other: str) -> int:
    """Count the edits (omit, add, replace, swap with a neighbour) that turn `one` into `other`.

    Each letter is edited at most once: the optimal string alignment distance.
    """
    before, above = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, wanted in enumerate(other, start=1):
            least = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                least = min(least, before[j - 2] + 1)
            row.append(least)
        before, above = above, row
    return above[-1]
