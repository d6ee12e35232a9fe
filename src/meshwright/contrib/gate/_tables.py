"""Say for every key of a kind of file whether a weighing needs it: one table for each kind, in `tables/`.

A key is understood, ignored by name with the reason why it changes no figure, or refused with what to do. A
key that stands in no table is refused too: whether it changes what is weighed is not known. A refused key
that is switched off (false, none, empty, 0) is no use of it.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from meshwright.errors import InputError, near_names

OFF = (None, False, "", 0, "none", "None", "null", "disabled", "no", "false")
MOST_NAMED = 12  # keys in one error
MOST_IGNORED = 4  # keys in its hint


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """The keys of one kind of file. A key that ends in `.*` stands for all below it.

    `understood`: our key, by theirs. `ignored`: why it changes no figure. `refused`: what to do. `off`:
    values of a refused key that are no use of it, beyond `OFF`.
    """

    kind: str
    understood: Mapping[str, str]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]
    off: Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The keys of one file: those that count, by our key, and those that do not, with the reason."""

    understood: Mapping[str, str]
    ignored: Mapping[str, str]


@functools.cache
def table(kind: str) -> KeyTable:
    """Return the table of one kind of file.

    >>> table("torchtitan").understood["training.seq_len"]
    'batch.sequence_length'
    """
    tree = tomllib.loads((files(__package__ or "") / "tables" / f"{kind}.toml").read_text("utf-8"))
    by_key = {
        name: {key: words for words, keys in tree.get(name, {}).items() for key in keys.split()}
        for name in ("understood", "ignored", "refused")
    }
    off = {key: tuple(values) for key, values in tree.get("off", {}).items()}
    return KeyTable(kind=kind, off=off, **by_key)


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables with dots, and their values; an empty table is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield f"{prefix}{name}", value


def seen_keys(known: KeyTable, file: str, values: Mapping[str, Any], ignore: Collection[str] = ()) -> Seen:
    """Sort the keys of a file.

    Args:
        values: by key, with dots.
        ignore: keys that the caller wants ignored; `x.*` is all below x.

    Raises:
        InputError: keys are refused, or stand in no table; one error names all.
    """
    understood: dict[str, str] = {}
    ignored: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    for key, value in values.items():
        if _entry(dict.fromkeys(ignore, "you left it out"), key) is not None:
            ignored[key] = "you left it out"
        elif key in known.understood:
            understood[key] = known.understood[key]
        elif (why := _entry(known.ignored, key)) is not None:
            ignored[key] = why
        elif _is_off(value) or value in known.off.get(key, ()):
            ignored[key] = "it is switched off"
        elif (what := _entry(known.refused, key)) is not None:
            problems.append((f"{key} = {_shown(value)}", what))
        else:
            near = near_names(key, [*known.understood, *known.ignored, *known.refused])
            meant = f"; did you mean {near[0]}?" if near else ""
            problems.append((f"{key} = {_shown(value)}", f"it is not known here{meant}"))
    if problems:
        words = "\n".join(f"  {key}: {what}" for key, what in problems[:MOST_NAMED])
        more = f"\n  and {len(problems) - MOST_NAMED} more" * (len(problems) > MOST_NAMED)
        keys = [key.partition(" ")[0] for key, _ in problems[:MOST_IGNORED]]
        raise InputError(
            f"{file}: read as {known.kind}, it has keys that may change what is weighed and are not "
            f"understood:\n{words}{more}",
            hint="change them as they say; or weigh without what they do: "
            + " ".join(f"--ignore {key}" for key in keys),
        )
    return Seen(understood=understood, ignored=ignored)


def _entry(entries: Mapping[str, str], key: str) -> str | None:
    """Return the entry of a key, or of the nearest `x.*` that it is below."""
    if key in entries:
        return entries[key]
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        if (found := entries.get(".".join((*parts[:count], "*")))) is not None:
            return found
    return None


def _is_off(value: Any) -> bool:
    return value in OFF if isinstance(value, (str, bool, int, float, type(None))) else not value


def _shown(value: Any) -> str:
    """Return a value in an error; unknown parts of words have zero bytes around them."""
    text = repr(value).replace("\\x00", "")
    return text if len(text) <= 50 else f"{text[:47]}..."


def whole(file: str, key: str, value: Any, least: int = 1) -> int:
    """Return a value that must be a whole number.

    Raises:
        InputError: it is none, or less than `least`.
    """
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    elif isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value, re.ASCII):
        number = int(value)
    if number is None or number < least or number >= 10**18:
        what = f"{file}: {key} = {_shown(value)} is no whole number of at least {least}"
        raise InputError(what, hint="write the number itself; variables and templates are not filled in")
    return number


def switch(file: str, key: str, value: Any) -> bool:
    """Return a value that must be true or false.

    Raises:
        InputError: it is neither.
    """
    words = str(value).strip().lower()
    if words in ("true", "yes", "1", "auto"):
        return True
    if words in ("false", "no", "0", "none", "null", ""):
        return False
    raise InputError(f"{file}: {key} = {_shown(value)} is neither true nor false", hint="write one of them")
