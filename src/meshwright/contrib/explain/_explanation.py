"""Hold what a file says of the memory that was too small, and make its report.

Each reader of this room returns an `Explanation`. Every figure of it is in the file, or follows from figures
of it by one subtraction, one product or one sum. What the file does not say is None, or absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from meshwright.reportable import Reportable
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.report import Document, ReportTable

SCHEMA = 1
MOST_BYTES = 2**60  # of a figure in a file; a larger one is none
MOST_ROWS, MOST_KEPT = 12, 1000  # of the largest buffers: on a screen, and in JSON
WIDEST = 30  # characters of a module on a screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A buffer, or all memory of one place in the source.

    `what`: its shape ("f32[16,12,2048,2048]"), or how many blocks. `place`: "attention.py:88". `category` and
    `module`: as far as the file shows. Each is "" where it is unknown.
    """

    num_bytes: int
    what: str
    place: str = ""
    category: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A change that needs less memory. `saved_bytes`: at most how many, None where the file does not tell."""

    change: str
    saved_bytes: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Reportable):
    """Return what a file says of memory that was too small.

    `kind`: what the file is. `lead`: what was too large, in words. `needed_bytes`, `usable_bytes`: of one
    device. `missing_bytes`: how much must go. `parts`: how the needed bytes divide, by name. `held`: the
    largest buffers, the largest first. `held_of`: what they are a part of, in words. `settings`: what would
    save memory.
    """

    path: str
    kind: str
    lead: str
    needed_bytes: int | None = None
    usable_bytes: int | None = None
    missing_bytes: int | None = None
    parts: dict[str, int]
    held: tuple[Held, ...] = ()
    held_of: str = "the largest buffers"
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Return what was too large, and the largest part of it."""
        if not self.held:
            return self.lead
        return f"{self.lead}: {_held_words(self.held[0])}"

    @property
    def what_must_go(self) -> str:
        """How much must go, and how many of the largest buffers hold as much; "" where it is unknown."""
        missing = self.missing_bytes
        if missing is None:
            return ""
        if missing <= 0:
            return f"{format_bytes(-missing)} would be left"
        words = f"{format_bytes(missing)} must go"
        total = 0
        for count, each in enumerate(self.held, start=1):
            total += each.num_bytes
            if total >= missing:
                them = "the largest alone holds" if count == 1 else f"the {count} largest together hold"
                return f"{words}: {them} {format_bytes(total)}"
        if not self.held:
            return words
        return f"{words}: all that are listed hold {format_bytes(total)}, so that they are not enough"

    def document(self) -> Document:
        """Return its report."""
        from meshwright.report import Document, Words, section

        must_go = [Words(text=self.what_must_go)] if self.what_must_go else []
        told = (*self.notes, f"read from {self.path}: {self.kind}")
        notes = (Words(text=note, tone="faint") for note in told)
        return Document(
            title=self.line,
            sections=(
                *section("", Words(text=self.line, tone="bad" if self._is_short else "strong"), *must_go),
                *section("What it is made of", self._parts_table()),
                *section(f"{self.held_of[:1].upper()}{self.held_of[1:]}", self._held_table()),
                *section("What would save memory", self._settings_table()),
                *section("", *notes),
            ),
        )

    @property
    def _is_short(self) -> bool:
        return self.missing_bytes is not None and self.missing_bytes > 0

    def _parts_table(self) -> ReportTable | None:
        from meshwright.report import ReportTable, plain_rows

        rows = plain_rows((name, format_bytes(size)) for name, size in self.parts.items())
        return ReportTable(columns=("", "bytes"), rows=rows, numbers=("bytes",), head=False) if rows else None

    def _held_table(self) -> ReportTable | None:
        from meshwright.report import ReportTable, TableRow

        if not self.held:
            return None
        names = ("what", "line", "category", "module")
        fields = ("what", "place", "category", "module")
        shown, rest = self.held[:MOST_ROWS], self.held[MOST_ROWS:]
        used = [place for place, field in enumerate(fields) if any(getattr(each, field) for each in shown)]
        rows = [
            TableRow(
                cells=(
                    format_bytes(each.num_bytes),
                    *(_shortened(getattr(each, fields[place])) for place in used),
                )
            )
            for each in shown
        ]
        if rest:
            size = format_bytes(sum(each.num_bytes for each in rest))
            cells = (size, f"{len(rest):,} smaller ones", *("" for _ in used[1:]))
            rows.append(TableRow(cells=cells, tone="faint"))
        columns = ("bytes", *(names[place] for place in used))
        return ReportTable(columns=columns, rows=tuple(rows), numbers=("bytes",), unbroken=3)

    def _settings_table(self) -> ReportTable | None:
        from meshwright.report import ReportTable, plain_rows

        rows = plain_rows(
            (each.change, _saving(each, self.missing_bytes), each.why) for each in self.settings
        )
        columns = ("change", "saves at most", "why")
        return ReportTable(columns=columns, rows=rows, numbers=columns[1:2]) if rows else None

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `explain --json` prints."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "kind": self.kind,
            "sentences": [text for text in (self.line, self.what_must_go) if text],
            "needed_bytes": self.needed_bytes,
            "usable_bytes": self.usable_bytes,
            "missing_bytes": self.missing_bytes,
            "parts": dict(self.parts),
            "held_of": self.held_of,
            "held": [asdict(each) for each in self.held[:MOST_KEPT]],
            "settings": [asdict(each) for each in self.settings],
            "notes": list(self.notes),
        }


def _saving(setting: Setting, missing: int | None) -> str:
    if setting.saved_bytes is None:
        return "not known yet"
    enough = missing is not None and 0 < missing <= setting.saved_bytes
    return f"{format_bytes(setting.saved_bytes)}{', enough' if enough else ''}"


def _shortened(text: str) -> str:
    return text if len(text) <= WIDEST else f"...{text[3 - WIDEST :]}"


def _held_words(held: Held) -> str:
    """Return a buffer in words: "9.40 GiB are f32[16,12,2048,2048] of attention.py:88"."""
    where = held.place or held.module or held.category
    return f"{format_bytes(held.num_bytes)} are {held.what}{f' of {where}' if where else ''}"


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
SIZE = r"(\d[\d,]{0,24}(?:\.\d{1,9})?)(?: ?([KMGTP])(?:iB|B)?(?![A-Za-z])| ?bytes|B)?"
"""An amount as XLA and PyTorch print it: 9.40GiB, 384.0KiB, 20.10G, 0B, 2.00 GiB, 6291456 (bytes)."""


def size_of(digits: str, unit: str | None) -> int | None:
    """Return the bytes that two groups of `SIZE` say; None if they are beyond every memory.

    >>> size_of("20.50", "G")
    22011707392
    """
    value = float(digits.replace(",", "")) * UNITS[unit or ""]
    return int(value) if math.isfinite(value) and value <= MOST_BYTES else None


def summed(held: Iterator[Held]) -> tuple[Held, ...]:
    """Return the buffers with those of the same shape, place, category and module as one, the largest first.

    >>> summed(iter([Held(num_bytes=4, what="f32[1]")] * 2))[0].what
    '2 x f32[1]'
    """
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    for each in held:
        entry = sums.setdefault((each.what, each.place, each.category, each.module), [0, 0])
        entry[0] += each.num_bytes
        entry[1] += 1
    made = [
        Held(
            num_bytes=num_bytes,
            what=what if count == 1 else f"{count} x {what}",
            place=place,
            category=category,
            module=module,
        )
        for (what, place, category, module), (num_bytes, count) in sums.items()
    ]
    return tuple(sorted(made, key=lambda each: (-each.num_bytes, each.what)))
