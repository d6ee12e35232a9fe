"""Aligned columns of plain text: what `str` of a record shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GAP = "  "


def aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), indent: str = ""
) -> str:
    """Lines whose columns stand below each other; the columns named in `right` end at the same place.

    Args:
        header: the columns' names; each row has as many cells.
        indent: before each line.
    """
    widths = [max(len(line[place]) for line in (header, *rows)) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        )
        return (indent + GAP.join(padded)).rstrip()

    return "\n".join(line(cells) for cells in (header, *rows))
