"""Errors, in words for the person who can act on them.

A user's mistake is a `MeshwrightError`: what happened with the values, and a computed hint.
A mistake of ours is an `assert`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Control characters but for tab and newline, halves of surrogate pairs, and what turns the direction of text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` with its control characters written out, so that a terminal does not obey them.

    "\\x1b[31m" stands for the escape sequence that would turn a terminal red.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class MeshwrightError(Exception):
    """Something the user can act on; `exit_code` is what the command line returns.

    Both texts may quote a user's exception or a file; their control characters are written out.

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
        """Pickle it with its hint, so that it can come from another process."""
        return _error_of, (type(self), self.message, self.hint)


def _error_of(kind: type[MeshwrightError], message: str, hint: str) -> MeshwrightError:
    return kind(message, hint=hint)


EXIT_BROKE_OFF = 4
"""Status of a process that ended with an error nobody foresaw, or that hung: it may do better once more."""


class InputError(MeshwrightError):
    """The user's input is wrong: an unknown name, a size that does not divide."""

    exit_code = 2


class CompileError(MeshwrightError):
    """The compiler or its worker failed; the message carries its own words."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the start of a hint for an unknown `name`: what it may be a slip of, or all of `known`.

    One name is a slip of another where at most a quarter of its letters (one at least) were left out, added,
    replaced or swapped with a neighbour, or where one begins with the other. Upper and lower case are alike.
    """
    names = sorted(known)
    close = near_names(name, names)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return "known: " + ", ".join(names) if names else "none are known"


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return those of `known` that `name` may be a slip of, as `nearest_name` has it: the nearest alone."""
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


_MOST_NAMES = 4  # offered at once
_LEAST_LETTERS = 3  # of a beginning that says something


def _begin_alike(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _num_slips(one: str, other: str) -> int:
    """Return the letters to leave out, add, replace or swap with a neighbour to turn `one` into `other`.

    Each letter takes part in one change at most: the optimal string alignment distance.
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
