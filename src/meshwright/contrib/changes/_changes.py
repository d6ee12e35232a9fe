"""Hold the changes that `explain` compiled, and show each with its effect on the step.

Used by: `_weighed_changes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.report import Document, ReportTable, Words, flop_words, plain_rows, section
from meshwright.reportable import Reportable
from meshwright.results import Change
from meshwright.units import format_bytes, format_seconds


class Changes(tuple[Change, ...], Reportable):
    """The changes that `explain` compiled, the largest memory saving first."""

    def document(self) -> Document:
        """Return its report."""
        return changes_document(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the changes as `weigh --explain --json` prints them."""
        return {"changes": [change.to_dict() for change in self]}

    def __str__(self) -> str:
        return Reportable.__str__(self)

    def __repr__(self) -> str:
        return Reportable.__repr__(self)

    @property
    def line(self) -> str:
        """The number of changes, and the one that saves most memory."""
        return f"{len(self)} compiled" + (f", first {self[0].arguments}" if self else "")


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
