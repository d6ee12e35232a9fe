"""Show the changes that `explain` compiled, each with its effect on the step. Used by: `_results`."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.results import Changes
from meshwright.units import format_bytes, format_seconds

from ._model import Document, ReportTable, Words, flop_words, plain_rows, section


def changes_document(changes: Changes) -> Document:
    """Return one row for each change with its effect on the step, then the changes that failed to compile."""
    title = "What would help"
    if not changes:
        words = Words(text="nothing that this config can change")
        return Document(title=title, sections=section(title, words))
    rows = plain_rows(
        (
            change.arguments,
            format_bytes(change.reserved_bytes),
            "" if change.saved_bytes is None else _signed(format_bytes, -change.saved_bytes),
            {True: "yes", False: "no", None: "?"}[change.fits],
            "" if change.extra_executed_flops is None else _signed(flop_words, change.extra_executed_flops),
            "" if change.step_seconds is None else format_seconds(change.step_seconds),
            "" if change.extra_seconds is None else _signed(format_seconds, change.extra_seconds),
        )
        for change in changes
        if change.reserved_bytes is not None
    )
    columns = ("change", "reserved", "memory", "fits", "FLOPs", "step", "time")
    numbers = ("reserved", "memory", "FLOPs", "step", "time")
    table = ReportTable(columns=columns, rows=rows, numbers=numbers, unbroken=1)
    failed = (
        Words(text=f"{change.arguments}: {change.failed}")
        for change in changes
        if change.reserved_bytes is None
    )
    return Document(
        title=title,
        sections=(
            *section("What would help, each change compiled", table),
            *section("Could not be compiled", *failed),
        ),
    )


def _signed(format_amount: Callable[[float], str], amount: float) -> str:
    return "0" if amount == 0 else f"{'+' if amount > 0 else '-'}{format_amount(abs(amount))}"
