"""Word the facts that read the same on the terminal and on the page.

They are reconciliation rows, the convention of FLOPs, intervals, costs, shares and links.
"""

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
    """Return operations by class, in the given order: "arithmetic 1.2T, comparison 34B"."""
    return ", ".join(f"{name} {format_count(count)}" for name, count in by_class.items())


HELP_COLUMNS = ("what", "saves", "of the step", "how certain")
HELP_NOTE = (
    "By walking the same schedule again; savings do not add up. A bound names no change: `--explain` "
    "compiles the changes that may reach it, and says what each really saves."
)


def ends_words(seconds: Interval, reasons: Sequence[str] = ()) -> str:
    """Return a step's interval, "between 1.0 s and 1.4 s", and the reasons if it is wide or lacks an end."""
    if seconds.low is None:
        ends = "no interval"
    elif seconds.high is None:
        ends = f"at least {format_seconds(seconds.low)}, no upper end"
    else:
        ends = f"between {format_seconds(seconds.low)} and {format_seconds(seconds.high)}"
    return f"{ends}: {'; '.join(reasons)}" if reasons else ends


def interval_words(seconds: Interval, reasons: Sequence[str] = ()) -> str:
    """Return "62.3 s (between 49.6 s and 74.5 s)", the form of the step's time on every page and screen."""
    return f"{format_seconds(seconds.expected)} ({ends_words(seconds, reasons)})"


LEAST_DEVICE_HOURS = 0.1  # below it, device-hours add nothing to the seconds


def run_words(total: RunTotal) -> str:
    """Return a line such as "15B tokens in 3,577 steps take 2.58 days (between 2.05 days and 3.09 days)"."""
    return (
        f"{format_count(total.tokens)} tokens in {total.steps:,} steps take {interval_words(total.seconds)}"
    )


def cost_words(total: RunTotal) -> str:
    """Return a line such as "891 (709 to 1.07K): 495 device-hours (394 to 592) at 1.80".

    Costs are in the currency of the price. Without a price the line has only the hours; it is "" if they are
    few.
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
    """Return the class of work of a slice of the step, in words: "matrix products"."""
    words = {
        "matmul": "matrix products",
        "memory-bound": "kernels bound by memory",
        "launch": "gaps between kernels",
    }
    return words.get(name, name)


def bubble_words(ticks: Ticks) -> str:
    """Return the number of a stage's passes that have no microbatch, with the counts that cause it."""
    idle = ticks.num_passes - ticks.num_microbatches
    few = ", fewer microbatches than stages" if ticks.num_microbatches < ticks.num_stages else ""
    return (
        f"{idle} of a stage's {ticks.num_passes} passes have none of the {ticks.num_microbatches} "
        f"microbatches ({ticks.num_stages} stages, {ticks.schedule}){few}"
    )


def kind_words(seconds_by_kind: Mapping[str, float]) -> str:
    """Return shares such as "compute 80.0 %, exposed communication 15.0 %, idle between kernels 5.0 %".

    The shares sum to the whole step.
    """
    whole = math.fsum(seconds_by_kind.values())
    names = {"communication": "exposed communication", "idle": "idle between kernels"}
    shares = (f"{names.get(kind, kind)} {100 * s / whole:.1f} %" for kind, s in seconds_by_kind.items())
    return f"{', '.join(shares)} of the step"


def help_rows(
    helps: Iterable[tuple[str, float, str, str]], step_seconds: float
) -> list[tuple[str, str, str, str]]:
    """Return the cells of `HELP_COLUMNS`.

    Args:
        helps: the subject, the seconds saved, the change ("" for a bound) and the certainty of each.
    """
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
    """Return the link that carries a message, with the torus dimensions along which it goes if known."""
    return f"{link} {'+'.join(dimensions)}" if dimensions else link


def comparison_rows(reconciliation: Reconciliation) -> list[tuple[str, str, str, str, str]]:
    """Return rows of quantity, prediction with interval, measurement, error, and method of measurement."""
    return [row_cells(row) for row in reconciliation.rows]


def row_cells(row: Row) -> tuple[str, str, str, str, str]:
    """Return one row of `comparison_rows`."""
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
    """Return a line that says whether the program that ran is the program that was weighed."""
    if reconciliation.same_program:
        return "The program that ran is the one that was weighed: their fingerprints are equal."
    return (
        "NOT THE PROGRAM THAT WAS WEIGHED: the compiler made another one here, and their fingerprints differ."
    )
