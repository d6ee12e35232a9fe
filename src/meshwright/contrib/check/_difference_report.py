"""Turn a difference into a report: sentences, the settings that differ, and the tables of what moved."""

from __future__ import annotations

from meshwright.report import Document, ReportTable, TableRow, Words, plain_rows, section

from ._difference import ChangeTable, Difference, amount_words, change_words, percent_words

MOST_ROWS = 12  # of a table; the others are one row


def difference_document(made: Difference) -> Document:
    """Return the sentences, the settings that differ, and a table for each quantity that moved."""
    tone = "good" if made.is_nothing else "strong"
    first, *others = made.sentences
    settings = plain_rows((name, *values) for name, values in made.settings.items())
    told = ReportTable(columns=("setting", "before", "after"), rows=settings, unbroken=1)
    tables = (part for table in made.tables for part in section(table.title, _table(table)))
    return Document(
        title=f"{made.before.label} and {made.after.label}",
        sections=(
            *section("", Words(text=first, tone=tone), *(Words(text=each) for each in others)),
            *(section("What differs in the settings", told) if settings else ()),
            *tables,
        ),
    )


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
