"""Describe a report as sections of paragraphs, tables and pictures, independent of where it is shown.

`_weighing` and `_results` make the `Document` of a result; `_terminal` and `_page` show it. Strings are plain
text, which the renderers escape. A terminal leaves out `Cards` and `Plot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.units import format_rate

Tone = Literal["", "strong", "faint", "good", "bad", "open", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A paragraph; `lead` is its beginning, in bold type. `sample`: its spaces and lines are kept."""

    text: str
    tone: Tone = ""
    lead: str = ""
    sample: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table.

    `is_part`: whether the row is a part of one above it. `bar`: a share of the whole that a terminal draws in
    place of the last cell, red if it is more than 1.
    """

    cells: tuple[str, ...]
    tone: Tone = ""
    is_part: bool = False
    bar: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table whose columns in `numbers` are right-aligned.

    `unbroken`: how many of the first columns a terminal keeps on one line. `head`: whether a terminal shows
    the names of the columns.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    numbers: tuple[str, ...] = ()
    unbroken: int = 0
    head: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A segment of `Bars`; `amount` is its size in words, `colour` that of a page."""

    name: str
    size: float
    amount: str
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Parts of a whole: one bar on a page, and on a terminal one row for each part.

    `whole` is the length of the bar, `base` the size that is 100 %. `limit`: the size that the parts may
    have; `free` is what they leave of it. `interval`: the ends of an estimate of their sum, with its words.
    """

    label: str
    parts: tuple[Part, ...]
    whole: float
    base: float
    limit: Part | None = None
    free: Part | None = None
    interval: tuple[float, float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture that `draw` makes on matplotlib axes of `height` inches.

    The legend's entries are pairs: a colour and words, for `lines` too, and for `shapes` a character and
    words.
    """

    label: str
    height: float
    draw: Callable[[Any], None]
    colours: tuple[tuple[str, str], ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
    shapes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """The few most important figures, each a value with its meaning."""

    items: tuple[tuple[str, str], ...]


Block = Words | Table | Bars | Plot | Cards


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks below a title. Without a title they belong to the head or the end of the document."""

    title: str
    blocks: tuple[Block, ...]
    tone: Tone = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report: a title, facts that continue it, and sections.

    Without facts a terminal leaves the title out, because the first section says the same.
    """

    title: str
    facts: str = ""
    sections: tuple[Section, ...]


def section(title: str, *blocks: Block | None, tone: Tone = "") -> tuple[Section, ...]:
    """Return a section of the blocks that are not None; nothing if none is left."""
    kept = tuple(block for block in blocks if block is not None)
    return (Section(title=title, blocks=kept, tone=tone),) if kept else ()


def plain_rows(rows: Iterable[tuple[str, ...]]) -> tuple[Row, ...]:
    """Return table rows of the given cells."""
    return tuple(Row(cells=cells) for cells in rows)


def flop_words(count: float) -> str:
    """Return "1.20 PFLOP"."""
    return format_rate(count, "FLOP")


def spaced(name: str) -> str:
    """Return a name as words: "saved activations"."""
    return name.replace("_", " ")


def percent(part: float, whole: float) -> str:
    """Return "31.8 %", the share of `part` in `whole`; "" if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else ""
