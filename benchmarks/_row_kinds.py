"""Say of which kind a published row is: fitted, seen or sealed. Every table of errors keeps them apart."""

from __future__ import annotations

import functools
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DECLARED = Path(__file__).parent / "row_kinds.toml"
SEALED, SEEN, FITTED, UNDECLARED = "sealed", "seen", "fitted", "kind not declared"
KINDS = (SEALED, SEEN, FITTED, UNDECLARED)


@functools.cache
def _declared() -> Mapping[tuple[str, int | None], tuple[str, str]]:
    """Return kind and date by source and number; the number is None where a whole source is declared."""
    found: dict[tuple[str, int | None], tuple[str, str]] = {}
    for entry in tomllib.loads(DECLARED.read_text())["kinds"]:
        if entry["kind"] not in (SEEN, FITTED):
            raise ValueError(f"{DECLARED.name}: {entry['kind']!r} is no kind to declare: {SEEN} or {FITTED}")
        for source in entry["sources"]:
            for number in entry.get("rows", [None]):
                if (source, number) in found:
                    raise ValueError(f"{DECLARED.name} declares {source} {number or ''} twice")
                found[source, number] = entry["kind"], str(entry["since"])
    return found


def declared(row_id: str) -> tuple[str, str] | None:
    """Return the kind that is declared of a row, and since when; None where nothing is."""
    source, _, number = row_id.rpartition("-")
    of_row = _declared().get((source, int(number))) if number.isdecimal() else None
    return of_row or _declared().get((source or row_id, None))


def kind_of(row_id: str) -> str:
    """Return the kind of a row by its id.

    >>> kind_of("mosaic-001"), kind_of("litgpt-002"), kind_of("mine-1")
    ('fitted', 'seen', 'kind not declared')
    """
    found = declared(row_id)
    return found[0] if found else UNDECLARED


def kind_in(row: Mapping[str, Any]) -> str:
    """Return the kind of a scored row: as its record has it, or by its id in records from before kinds."""
    return row.get("kind") or kind_of(row["id"])


def counted(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many rows are of each kind, sealed ones first."""
    count = Counter(kind_in(row) for row in rows)
    return {kind: count[kind] for kind in KINDS if kind in count}


def in_words(kinds: Mapping[str, int]) -> str:
    """Return a count of kinds in words: the kind alone where there is one.

    >>> in_words({"fitted": 3}), in_words({"sealed": 1, "fitted": 3})
    ('fitted', '1 sealed, 3 fitted')
    """
    return (
        ", ".join(kinds)
        if len(kinds) == 1
        else ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    )


def undeclared_sources(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sources of rows whose kind nobody declared."""
    return sorted({row["source"] for row in rows if kind_in(row) == UNDECLARED})
