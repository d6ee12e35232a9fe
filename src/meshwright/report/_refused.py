"""Make the document of a step that the compiler refused, since a device has too little memory for it.

Nothing was compiled: it has a verdict by the compiler's figures, and what would help, and no costs and no
time. Used by: `_results`, for a terminal and for a page.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.compiler import Refusal
from meshwright.results import Weighing
from meshwright.units import format_bytes, format_count, format_seconds

from ._costs import suggestion_table
from ._model import Document, ReportTable, Words, plain_rows, section


def refused_document(weighing: Weighing) -> Document:
    """Return the verdict on a step that the compiler refused, and the changes that may make it fit."""
    refusal = weighing.refusal
    assert refusal is not None, "any other step has another document"
    seconds = format_seconds(refusal.seconds)
    words = Words(text=f"{refusal.compiler} refused it after {seconds}: {refusal.words}", tone="faint")
    return Document(
        title=weighing.name,
        facts=_title_facts(weighing, refusal),
        sections=(
            *section("", *_verdict(weighing, refusal)),
            *section("What its arguments take of one device", _argument_table(refusal)),
            *section("What would make it smaller", suggestion_table(weighing.suggestions)),
            *section("", words),
        ),
    )


def _title_facts(weighing: Weighing, refusal: Refusal) -> str:
    words = f"on {weighing.fleet.name}, layout {weighing.layout}"
    if refusal.num_parameters is not None:
        words += f", {format_count(refusal.num_parameters)} parameters"
    if weighing.tokens_per_step is not None:
        unit = "tokens" if weighing.config is None else weighing.config.batch_unit
        words += f", {weighing.tokens_per_step:,} {unit} per step"
    return words


def _verdict(weighing: Weighing, refusal: Refusal) -> Iterator[Words]:
    for warning in weighing.warnings:
        yield Words(text=warning, tone="warning")
    yield Words(text=f"DOES NOT FIT: {refusal.line}, as the compiler says", tone="bad")
    yield Words(text="STEP: none: the compiler made no program, so that nothing else is known of it")
    if weighing.plan_command is not None:
        yield Words(text=f"PLAN: `{weighing.plan_command}` searches other layouts")


def _argument_table(refusal: Refusal) -> ReportTable | None:
    held = ((role, size) for role, size in refusal.argument_bytes_by_role.items() if size)
    rows = plain_rows((role.replace("_", " "), format_bytes(size)) for role, size in held)
    return ReportTable(columns=("", "bytes"), rows=rows, numbers=("bytes",), head=False) if rows else None
