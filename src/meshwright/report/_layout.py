"""How a terminal's text is laid out: headings, indents, tables without lines."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def heading(words: str) -> Text:
    """What the following lines are about."""
    return Text(words, style="bold")


def indented(part: RenderableType) -> Padding:
    """Two columns to the right, below its heading."""
    return Padding(part, (0, 0, 0, 2))


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Columns without lines around them; those named in `right` hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: RenderableType, style: str = "") -> None:
    """A row whose strings are taken as they are: rich would read "[tensor]" as markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def spaced(name: str) -> str:
    """A name as words: "saved activations"."""
    return name.replace("_", " ")
