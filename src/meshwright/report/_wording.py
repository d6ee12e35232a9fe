"""What reads the same on the terminal and on the page: a reconciliation's rows, how FLOPs are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshwright.config import Ticks
from meshwright.predict import Interval, RunTotal
from meshwright.reconciliation import Reconciliation, Row
from meshwright.units import format_bytes, format_count, format_rate, format_seconds

FLOP_CONVENTION = (
    "A multiply-add is two. Model: matrix products, convolutions and attention as written, nothing "
    "recomputed, causal attention by the half that is needed. Executed: those of the compiled program, as "
    "often as they run. Elementwise work is in neither."
)


def elementwise_words(by_class: dict[str, int]) -> str:
    """ "arithmetic 1.2T, comparison 34B": operations by class, as they come."""
    return ", ".join(f"{name} {format_count(count)}" for name, count in by_class.items())


HELP_COLUMNS = ("what", "saves", "of the step", "how certain")
HELP_NOTE = (
    "By walking the same schedule again; savings do not add up. A bound names no change: `--explain` "
    "compiles the changes that may reach it, and says what each really saves."
)


def ends_words(seconds: Interval, reasons: Sequence[str] = ()) -> str:
    """Return a step's interval with the reasons why it is wide or lacks an end: "between 1.0 s and 1.4 s"."""
    if seconds.low is None:
        ends = "no interval"
    elif seconds.high is None:
        ends = f"at least {format_seconds(seconds.low)}, no upper end"
    else:
        ends = f"between {format_seconds(seconds.low)} and {format_seconds(seconds.high)}"
    return f"{ends}: {'; '.join(reasons)}" if reasons else ends


def interval_words(seconds: Interval, reasons: Sequence[str] = ()) -> str:
    """Return "62.3 s (between 49.6 s and 74.5 s)"; every page and screen prints the step's time by this."""
    return f"{format_seconds(seconds.expected)} ({ends_words(seconds, reasons)})"


LEAST_DEVICE_HOURS = 0.1  # with less, device-hours say nothing that the seconds do not


def run_words(total: RunTotal) -> str:
    """Return "15B tokens in 3,577 steps take 2.58 days (between 2.05 days and 3.09 days)"."""
    return (
        f"{format_count(total.tokens)} tokens in {total.steps:,} steps take {interval_words(total.seconds)}"
    )


def cost_words(total: RunTotal) -> str:
    """Return "891 (709 to 1.07K): 495 device-hours (394 to 592) at 1.80", in the currency of the price.

    Without a price there are the hours alone; "" where they are few.
    """
    hours = total.device_hours
    if total.cost is None and hours.expected < LEAST_DEVICE_HOURS:
        return ""
    words = _spread(hours, _three_digits, " device-hours")
    if total.cost is None or total.price_per_device_hour is None:
        return words
    return f"{_spread(total.cost, _money)}: {words} at {_money(total.price_per_device_hour)}"


def _spread(amounts: Interval, shown: Callable[[float], str], unit: str = "") -> str:
    words = f"{shown(amounts.expected)}{unit}"
    if amounts.low is None:
        return f"{words} (no interval)"
    if amounts.high is None:
        return f"{words} (at least {shown(amounts.low)})"
    return f"{words} ({shown(amounts.low)} to {shown(amounts.high)})"


def _three_digits(amount: float) -> str:
    return format_count(amount) if amount >= 999.5 else f"{amount:.3g}"


def _money(amount: float) -> str:
    return f"{amount:.2f}" if 0.995 <= amount < 99.5 else _three_digits(amount)


def kind_of_slice(name: str) -> str:
    """Return the class of work that a slice of the step is, in words: "matrix products"."""
    words = {
        "matmul": "matrix products",
        "memory-bound": "kernels bound by memory",
        "launch": "gaps between kernels",
    }
    return words.get(name, name)


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
    helps: Iterable[tuple[str, float, str, str]], step_seconds: float
) -> list[tuple[str, str, str, str]]:
    """Return the cells of `HELP_COLUMNS`, from what, seconds saved, change ("" of a bound) and certainty."""
    return [
        (
            change or what,
            f"{'' if change else 'at most '}{format_seconds(saved)}",
            f"{100 * saved / step_seconds:.1f} %",
            certainty,
        )
        for what, saved, change, certainty in helps
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
