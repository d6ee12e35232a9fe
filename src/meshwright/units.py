"""Print and parse quantities, and lay out plain-text tables of them.

Quantities are printed with three significant digits, counts below 1000 exactly. Counts are parsed as people
write them ("15T"). `aligned` makes the tables that `str` of a record shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from meshwright.errors import InputError

_COUNT_LETTERS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))
_MOST_DIGITS = 40  # real counts have fewer, and a float's range holds every such count
_SI = ("", "k", "M", "G", "T", "P", "E", "Z")
_LONGEST_COUNT = 64  # characters; Python refuses to parse integers of thousands of digits
# Seconds in the unit, its name, and the seconds from which the next unit is used.
_TIMES = ((1e-6, "us", 1e-3), (1e-3, "ms", 1), (1, "s", 120), (60, "min", 7200), (3600, "h", 172800))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _three_digits(value: float) -> str:
    """Format `value` below 1000 with three significant digits: "1.50", "79.1", "989"."""
    for digits, below in ((2, 9.995), (1, 99.95)):
        if abs(value) < below:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def _scaled(value: float, step: int, num_prefixes: int) -> tuple[str, int]:
    """Return three digits of `value` in the largest prefix that leaves at least 1, and the prefix's index."""
    power = 0
    while abs(value) >= step - 0.5 and power < num_prefixes - 1:
        value /= step
        power += 1
    return _three_digits(value), power


def format_bytes(num_bytes: float) -> str:
    """Format memory in powers of 1024: "512 B", "1.50 MiB", "79.1 GiB"."""
    digits, power = _scaled(num_bytes, 1024, len(_BINARY))
    return f"{num_bytes:.0f} B" if power == 0 else f"{digits} {_BINARY[power]}"


def parse_bytes(text: str) -> int:
    """Parse an amount of memory with its unit: "20GiB" in powers of 1024, "20GB" in powers of 1000, "4096B".

    Raises:
        InputError: the text is no such amount, or not a whole number of bytes.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    from fractions import Fraction  # late: `--help` needs none

    amount = r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*(?:([KMGT])(i?))?B\s*"
    match = re.fullmatch(amount, text, re.ASCII | re.IGNORECASE)
    if match is not None:
        power = " KMGT".index((match[2] or " ").upper())
        num_bytes = Fraction(match[1]) * (1024 if match[3] else 1000) ** power
        if num_bytes.denominator == 1:
            return int(num_bytes)
    raise InputError(f"cannot read {text!r} as an amount of memory", hint="write it as 20GiB, 512MiB or 20GB")


def exact_bytes(num_bytes: int) -> str:
    """Format memory as `parse_bytes` reads it, without rounding: "20GiB", "1536MiB", "1000B".

    >>> exact_bytes(20 * 2**30)
    '20GiB'
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes % 1024**power == 0 and num_bytes:
            return f"{num_bytes // 1024**power}{unit}"
    return f"{num_bytes}B"


def format_count(count: float) -> str:
    """Format a count exactly below 1000, else with three digits: "512", "8.03B", "15T", "3.14e23"."""
    if abs(count) >= 999.5e12:
        return format_power_of_ten(count)
    for letter, size in _COUNT_LETTERS:
        if abs(count) >= size * 0.9995:
            digits = _three_digits(count / size)
            return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + letter
    return f"{count:.4g}"


def format_power_of_ten(count: float) -> str:
    """Format a count with three digits and its power of ten: "3.14e23", "5.00e12"."""
    digits, _, power = f"{count:.2e}".partition("e")
    return f"{digits}e{int(power)}"


def format_price(amount: float) -> str:
    """Format an amount of money: whole from 100, else with three digits: "1,200", "3.99", "0.0707".

    >>> format_price(1200.4), format_price(0.07071)
    ('1,200', '0.0707')
    """
    return f"{amount:,.0f}" if amount >= 99.95 else f"{amount:.3g}"


def format_rate(value: float, unit: str) -> str:
    """Format a value with a decimal SI prefix: "989 TFLOP/s", "3.35 TB/s", "12.5 GB" of traffic."""
    digits, power = _scaled(value, 1000, len(_SI))
    return f"{digits} {_SI[power]}{unit}"


def format_seconds(seconds: float, like: float | None = None) -> str:
    """Format a duration in a fitting unit: "842 ms", "1.73 s", "12.4 min", "3.20 h", "77.1 days".

    Args:
        like: a duration whose unit is used, as for the ends of its interval.

    >>> format_seconds(161_640, like=181_440)
    '1.87 days'
    """
    fitting = abs(seconds if like is None else like)
    size, unit = next(
        ((size, unit) for size, unit, below in _TIMES if fitting < below * 0.9995), (86400, "days")
    )
    amount = seconds / size
    if abs(amount) >= 999.5:
        return f"{amount:,.0f} {unit}"
    return f"{amount:.2g} {unit}" if 0 < abs(amount) < 0.0995 else f"{_three_digits(amount)} {unit}"


def parse_count(text: str) -> int:
    """Parse a count such as "15T", "300e9", "4M", "1.5B" or "4096"; letters are powers of ten.

    Raises:
        InputError: the text is not a number, not finite, negative, or not a whole number.

    >>> parse_count("1.5B")
    1500000000
    """
    from fractions import Fraction  # late: `--help` needs none

    match = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d+)?(?:[eE][+]?\d{1,2})?)\s*([KMBTkmbt]?)\s*", text, re.ASCII)
    if match is None or len(text) > _LONGEST_COUNT:
        shown = text if len(text) <= _LONGEST_COUNT else f"{text[:_LONGEST_COUNT]}..."
        raise InputError(f"cannot read {shown!r} as a count", hint="write it as 15T, 300e9, 4M or 4096")
    digits = match[1].replace("_", "").replace(",", "")
    if len(digits) > _MOST_DIGITS:
        what = f"{text[:20]!r}... has {len(digits)} digits"
        raise InputError(what, hint=f"write at most {_MOST_DIGITS} digits, as in 300e9")
    exact = Fraction(digits) * dict(_COUNT_LETTERS).get(match[2].upper(), 1)
    if exact.denominator != 1:
        what = f"{text!r} is {float(exact):g}, which is not a whole number"
        raise InputError(what, hint=f"use {math.floor(exact)}")
    return exact.numerator


def parse_seconds(text: str) -> float:
    """Parse a duration such as "1.31s", "1310ms", "850us" or "1.31", which is in seconds.

    Raises:
        InputError: the text is no such duration, or is not above zero and finite.

    >>> parse_seconds("1310ms")
    1.31
    """
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?(?:[eE][+-]?\d{1,2})?)\s*(us|ms|s|)\s*", text, re.ASCII)
    seconds = 0.0 if match is None else float(match[1]) / {"us": 1e6, "ms": 1e3}.get(match[2], 1.0)
    if not 0 < seconds < math.inf:
        hint = "write them as 1.31s, 1310ms or 850us"
        raise InputError(f"cannot read {text[:40]!r} as the seconds of a step", hint=hint)
    return seconds


def aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), indent: str = ""
) -> str:
    """Lay out a table with left-aligned columns; columns named in `right` are right-aligned.

    Args:
        header: the columns' names; each row has the same number of cells.
        rows: the cells of each line below the header.
        right: the names of the right-aligned columns.
        indent: text before each line.
    """
    widths = [max(len(line[place]) for line in (header, *rows)) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        )
        return (indent + "  ".join(padded)).rstrip()

    return "\n".join(line(cells) for cells in (header, *rows))
