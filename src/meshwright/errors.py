"""Define the errors of Meshwright, worded for the person who can act on them.

A user's mistake raises a `MeshwrightError`: what happened, with the values, and a computed hint.
A mistake in Meshwright itself fails an `assert`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Control characters except tab and newline, halves of surrogate pairs, and marks of text direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` with its control characters escaped, so that a terminal does not obey them.

    For example, the sequence that would turn a terminal red becomes the text "\\x1b[31m".
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class MeshwrightError(Exception):
    """An error that the user can act on; `exit_code` is the command line's exit status.

    Both texts may quote a user's exception or a file, so their control characters are escaped.

    Args:
        message: what happened, with the values.
        hint: what to do next; computed from the values, never generic.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        self.message = printable(message)
        self.hint = printable(hint)
        super().__init__(f"{self.message}\n  hint: {self.hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with its hint, so that it can be sent from another process."""
        return _error_of, (type(self), self.message, self.hint)


def _error_of(kind: type[MeshwrightError], message: str, hint: str) -> MeshwrightError:
    return kind(message, hint=hint)


EXIT_BROKE_OFF = 4
"""Status of a process that ended with an error nobody foresaw, or that hung: it may do better once more."""


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
    """
    names = sorted(known)
    close = near_names(name, names)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return "known: " + ", ".join(names) if names else "none are known"


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the names in `known` that are similar to `name` (see `nearest_name`): only the most similar."""
    lower, limit = name.lower(), max(1, len(name) // 4)
    names = sorted(known)
    by_distance: dict[int, list[str]] = {}
    for each in names:
        if abs(len(each) - len(name)) <= limit:
            by_distance.setdefault(_num_slips(lower, each.lower()), []).append(each)
    longer = [each for each in names if len(name) >= _LEAST_LETTERS and each.lower().startswith(lower)]
    least = min(by_distance, default=limit + 1)
    if least <= limit:
        close = by_distance[least]
        alike = [each for each in close if _begin_alike(lower, each.lower())]
        return alike[:1] or longer[:_MOST_NAMES] or close[:_MOST_NAMES]
    shorter = [each for each in names if len(each) >= _LEAST_LETTERS and lower.startswith(each.lower())]
    return longer[:_MOST_NAMES] or sorted(shorter, key=len)[-1:]


_MOST_NAMES = 4  # suggested at once
_LEAST_LETTERS = 3  # the shortest beginning that is compared


def _begin_alike(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _num_slips(one: str, other: str) -> int:
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
