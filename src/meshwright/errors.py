"""What goes wrong, in words for the person who can mend it.

A user's mistake is a `MeshwrightError`: what happened with the values, and a computed hint.
A mistake of ours is an `assert`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshwrightError(Exception):
    """Something the user can act on; `exit_code` is what the command line returns.

    Args:
        message: what happened, with the values.
        hint: what to do next; computed from the values, never generic.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint


EXIT_BROKE_OFF = 4
"""Status of a process that ended with an error nobody foresaw, or that hung: it may do better once more."""


class InputError(MeshwrightError):
    """The user's input is wrong: an unknown name, a size that does not divide."""

    exit_code = 2


class CompileError(MeshwrightError):
    """The compiler or its worker failed; the message carries its own words."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The start of a hint for an unknown `name`: the nearest of `known`, or all of them if few."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    if close:
        return f"did you mean {next(n for n in names if n.lower() == close[0])!r}?"
    return "known: " + ", ".join(names) if names else "none are known"
