"""Write a gate's answer as a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.report import Document, ReportTable, TableRow, Words, section
from meshwright.units import format_price, format_seconds

from ._trainers import Configured

if TYPE_CHECKING:
    from ._gate import Gate


def gate_document(made: Gate) -> Document:
    """Return the verdict, the figures, changes with which it may go, and what was read and left out."""
    weighed, program, launch = made.weighing, made.job.program, made.job.launch
    rows = [
        TableRow(cells=("launcher", "none" if launch is None else launch.kind)),
        TableRow(
            cells=(
                "trains",
                program.line if isinstance(program, Configured) else f"{program.kind}: {program.file}",
            )
        ),
        TableRow(cells=("weighed", weighed.line)),
        TableRow(cells=("whole run", _run(made))),
        *([TableRow(cells=("price", made.price_words))] if made.price_words else []),
    ]
    reasons = [Words(text=f"{reason}.", tone="bad") for reason in made.reasons]
    cures = [Words(text=f"With {cure.change} it may go: {cure.words}.", tone="good") for cure in made.cures]
    if made.reasons and not made.cures:
        cures = [
            Words(text="No single change was found with which it may go: meshwright plan searches further.")
        ]
    ignored = {} if isinstance(program, Configured) else program.seen.ignored
    left = {**({} if launch is None else launch.seen.ignored), **ignored}
    return Document(
        title=made.line,
        sections=(
            *section("", Words(text=made.line, tone="good" if made.may_go else "bad"), *reasons, *cures),
            *section("", ReportTable(columns=("what", "is"), rows=tuple(rows), unbroken=1, head=False)),
            *(section("Assumed", *(Words(text=note) for note in made.notes)) if made.notes else ()),
            *(section("Left out, by name", _left_out(left)) if left else ()),
        ),
    )


def _run(made: Gate) -> str:
    total = made.weighing.run_total
    if total is None:
        return "its length is not known: --tokens COUNT"
    cost = "" if total.cost is None else f", costs {format_price(total.cost.expected)}"
    return f"{total.steps:,} steps, {format_seconds(total.seconds.expected)}{cost}"


def _left_out(ignored: Mapping[str, str]) -> ReportTable:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for key, why in ignored.items():
        by_reason[why].append(key)
    rows = tuple(TableRow(cells=(why, " ".join(keys))) for why, keys in by_reason.items())
    return ReportTable(columns=("since", "keys"), rows=rows)
