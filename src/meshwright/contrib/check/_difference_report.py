"""Turn a difference into a report: sentences, the settings that differ, and the tables of what moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.report import (
    CURVES,
    Bars,
    Document,
    Plot,
    ReportTable,
    TableRow,
    Words,
    byte_ticks,
    colours_of,
    parts_of,
    plain_rows,
    section,
)
from meshwright.units import format_seconds

from ._difference import ChangeTable, Difference, amount_words, change_words, percent_words
from ._figures import Figures

MOST_ROWS = 12  # of a table; the others are one row


def difference_document(made: Difference) -> Document:
    """Return the sentences, the settings that differ, and a table for each quantity that moved."""
    tone = "good" if made.is_nothing else "strong"
    first, *others = made.sentences
    settings = plain_rows((name, *values) for name, values in made.settings.items())
    told = ReportTable(columns=("setting", "before", "after"), rows=settings, unbroken=1)
    tables = (part for table in made.tables if table.rows for part in section(table.title, _table(table)))
    return Document(
        title=f"{made.before.label} and {made.after.label}",
        sections=(
            *section("", Words(text=first, tone=tone), *(Words(text=each) for each in others)),
            *(section("What differs in the settings", told) if settings else ()),
            *tables,
        ),
    )


def difference_page(made: Difference) -> Document:
    """Return the report with both curves of the memory, and both steps, above the tables."""
    whole = difference_document(made)
    pictures = (
        *section("Memory through the step", _curves(made)),
        *section("Time of a step", *_times(made)),
    )
    return replace(whole, sections=(whole.sections[0], *pictures, *whole.sections[1:]))


def _curves(made: Difference) -> Plot | None:
    """Return both curves of the memory through the step, for a page; None where it is the same or unknown."""
    sides = made.before, made.after
    if not all(side.curve for side in sides) or made.before.curve == made.after.curve:
        return None

    def draw(axes: Any) -> None:
        for side, colour in zip(sides, CURVES, strict=False):
            axes.step(*zip(*side.curve, strict=True), where="post", color=colour, linewidth=1.4)
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("share of the schedule; loops once")
        ticks = byte_ticks(0, axes.get_ylim()[1], 6)
        axes.set_yticks([place for place, _ in ticks], [words for _, words in ticks])

    lines = tuple((colour, side.label) for side, colour in zip(sides, CURVES, strict=False))
    return Plot(label="bytes that live on a device, before and after", height=2.8, draw=draw, colours=lines)


def _times(made: Difference) -> Iterator[Words | Bars]:
    """Yield a bar of the predicted step of each side, on one scale; nothing where the time is the same."""
    sides = made.before, made.after
    if made.before.seconds == made.after.seconds or not all(side.step_seconds for side in sides):
        return
    longest = max(side.step_seconds or 0.0 for side in sides)
    names = dict.fromkeys(name.partition("[")[0] for side in sides for name in side.seconds)
    colours = colours_of(names)
    for side in sides:
        yield Words(lead=f"{side.label}: ", text=format_seconds(side.step_seconds or 0.0))
        yield _bar(side, colours, longest)


def _bar(side: Figures, colours: dict[str, str], longest: float) -> Bars:
    sizes: dict[str, float] = {}
    for name, seconds in side.seconds.items():
        kind = name.partition("[")[0]
        sizes[kind] = sizes.get(kind, 0.0) + max(seconds, 0.0)
    parts = parts_of(sizes, colours, format_seconds)
    return Bars(label=side.label, parts=parts, whole=longest, base=side.step_seconds or longest)


def _table(table: ChangeTable) -> ReportTable:
    """Return the rows of a table, then the sum of the smaller ones, then the total."""
    shown, rest = table.rows[:MOST_ROWS], table.rows[MOST_ROWS:]
    has_places = any(row.place for row in shown)
    rows = [
        TableRow(cells=_cells(row.name, row.place, row.before, row.after, table.unit, has_places))
        for row in shown
    ]
    if rest:
        before, after = (sum(getattr(row, side) for row in rest) for side in ("before", "after"))
        name = f"{len(rest)} smaller changes"
        rows.append(TableRow(cells=_cells(name, "", before, after, table.unit, has_places), tone="faint"))
    total = _cells("total", "", table.before, table.after, table.unit, has_places)
    rows.append(TableRow(cells=total, tone="strong"))
    columns = ("what", *(("where",) if has_places else ()), "before", "after", "change", "%")
    return ReportTable(columns=columns, rows=tuple(rows), numbers=("before", "after", "change", "%"))


def _cells(
    name: str, place: str, before: float, after: float, unit: str, has_places: bool
) -> tuple[str, ...]:
    return (
        name.replace("_", " ") or "outside any module",
        *((place,) if has_places else ()),
        amount_words(before, unit),
        amount_words(after, unit),
        change_words(after - before, unit),
        percent_words(before, after),
    )
