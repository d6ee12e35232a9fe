"""What reads the same on the terminal and on the page: a reconciliation's rows, how FLOPs are counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from meshwright.config import Ticks
from meshwright.reconcile import Reconciliation, Row
from meshwright.units import format_bytes, format_count, format_rate, format_seconds

FLOP_CONVENTION = (
    "A multiply-add is two. Model: matrix products, convolutions and attention as written, nothing "
    "recomputed, causal attention by the half that is needed. Executed: those of the compiled program, as "
    "often as they run. Elementwise work is in neither."
)


def elementwise_words(by_class: dict[str, int]) -> str:
    """ "arithmetic 1.2T, comparison 34B": operations by class, as they come."""
    return ", ".join(f"{name} {format_count(count)}" for name, count in by_class.items())


HELP_NOTE = (
    "Upper bounds, by walking the same schedule again; they do not add up. `--explain` compiles real changes."
)


def bubble_words(ticks: Ticks) -> str:
    """How many of a stage's passes have no microbatch, and what would make them fewer."""
    idle = ticks.num_passes - ticks.num_microbatches
    few = ", fewer microbatches than stages" if ticks.num_microbatches < ticks.num_stages else ""
    return (
        f"{idle} of a stage's {ticks.num_passes} passes have none of the {ticks.num_microbatches} "
        f"microbatches ({ticks.num_stages} stages, {ticks.schedule}){few}"
    )


def kind_words(seconds_by_kind: Mapping[str, float]) -> str:
    """ "compute 80.0 %, exposed communication 15.0 %, idle 5.0 % of the step"; they sum to all of it."""
    whole = math.fsum(seconds_by_kind.values())
    names = {"communication": "exposed communication", "idle": "idle between kernels"}
    shares = (f"{names.get(kind, kind)} {100 * s / whole:.1f} %" for kind, s in seconds_by_kind.items())
    return f"{', '.join(shares)} of the step"


def help_rows(
    helps: Iterable[tuple[str, float, str]], step_seconds: float
) -> list[tuple[str, str, str, str]]:
    """What, seconds saved at most, their share of the step, and how; of what, seconds saved and how."""
    return [
        (what, format_seconds(saved), f"{100 * saved / step_seconds:.1f} %", how)
        for what, saved, how in helps
    ]


def link_words(link: str, dimensions: Sequence[str]) -> str:
    """The link that carries a message, and along which dimensions of a torus where that is known."""
    return f"{link} {'+'.join(dimensions)}" if dimensions else link


def comparison_rows(reconciliation: Reconciliation) -> list[tuple[str, str, str, str, str]]:
    """Quantity, predicted with its interval, measured, error of the prediction, how it was measured."""
    return [row_cells(row) for row in reconciliation.rows]


def row_cells(row: Row) -> tuple[str, str, str, str, str]:
    """One row of `comparison_rows`."""
    error = "" if row.relative_error is None else f"{100 * row.relative_error:+.1f} %"
    return row.quantity, _predicted(row), _amount(row.measured, row.unit), error, row.how


def _predicted(row: Row) -> str:
    expected = _amount(row.predicted, row.unit)
    if row.low is None or row.high is None:
        return expected
    return f"{expected} ({_amount(row.low, row.unit)} to {_amount(row.high, row.unit)})"


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    if unit == "FLOP":
        return format_rate(value, "FLOP")
    if unit == "seconds":
        return format_seconds(value)
    return f"{100 * value:.1f} %" if unit == "share" else f"{format_count(value)} {unit}"


def program_line(reconciliation: Reconciliation) -> str:
    """Whether what was predicted is of the program that ran."""
    if reconciliation.same_program:
        return "The program that ran is the one that was weighed: their fingerprints are equal."
    return (
        "NOT THE PROGRAM THAT WAS WEIGHED: the compiler made another one here, and their fingerprints differ."
    )
