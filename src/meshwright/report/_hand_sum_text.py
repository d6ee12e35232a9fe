"""The hand sum beside the compiled program's bytes, on a terminal."""

from __future__ import annotations

from rich.console import RenderableType

from meshwright.units import format_bytes

from ._hand_sum import HandSum
from ._layout import add_row, indented, plain_table


def hand_sum_table(found: HandSum) -> RenderableType:
    """One row for each quantity: by hand on the whole fleet, on one device, and compiled."""
    table = plain_table(
        "quantity", "by hand", "/ devices", "compiled", "why", right=("by hand", "/ devices", "compiled")
    )
    for row in found.rows:
        add_row(
            table,
            f"{'= ' * (row.quantity == 'total')}{row.quantity}",
            format_bytes(row.whole_bytes),
            format_bytes(row.device_bytes),
            format_bytes(row.compiled_bytes),
            row.why,
            style="bold" if row.quantity == "total" else "",
        )
    for column in table.columns[:4]:
        column.no_wrap = True
    return indented(table)
