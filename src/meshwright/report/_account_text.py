"""The account of a PyTorch module as a person reads it on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.eager import Account, Table, flop_table, memory_table, module_table, unknown_table
from meshwright.units import format_count

from ._layout import add_row, heading, indented, plain_table


def account_text(account: Account) -> RenderableType:
    """The whole account, for rich's consoles of 80 columns or more."""
    title = Text.assemble((account.name, "bold"))
    title.append(f", {format_count(account.num_parameters)} parameters")
    parts: list[RenderableType] = [title, Text()]
    parts += _section("Memory of one training step", memory_table(account.memory))
    parts += _section("FLOPs of one training step", flop_table(account.flops))
    parts += _section("Modules that cost the most, their children included", module_table(account))
    parts += _section("Without a rule, in no sum", unknown_table(account))
    parts += [heading("Conventions"), *(indented(Text(words, style="dim")) for words in account.conventions)]
    parts += [Text(), Text(f"{account.source}; torch {account.torch_version}", style="dim")]
    return Group(*parts)


def _section(words: str, table: Table) -> list[RenderableType]:
    """Nothing where the table is empty."""
    header, rows, right = table
    if not rows:
        return []
    made = plain_table(*header, right=right)
    for row in rows:
        add_row(made, *row)
    return [heading(words), indented(made), Text()]
