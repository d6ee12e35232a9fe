"""What a calibration says, in the form in which the tables say it: measured figures go before them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ._calibration import Calibration, MeasuredAttention
from ._models import AttentionRate, CollectiveRate
from ._rates import ChipRates


def with_collectives(
    rates: ChipRates, calibration: Calibration, link_bytes_per_second: float, devices_per_host: int = 1
) -> ChipRates:
    """The rates with every measured kind and group size in the place of the table's.

    `devices_per_host`: how many simulated devices share what was measured of them together, else 1.
    """
    collectives: dict[str, Mapping[int, CollectiveRate]] = dict(rates.collectives)
    for each in calibration.collectives:
        rate = CollectiveRate(
            efficiency=each.bytes_per_second / devices_per_host / link_bytes_per_second,
            alpha_seconds=each.latency_seconds,
            ramp_seconds=0.0,
        )
        collectives[each.kind] = {**collectives[each.kind], each.group_size: rate}
    return replace(rates, collectives=collectives)


def launch_seconds_among(calibration: Calibration, num_devices: int) -> float:
    """A launch on each of several simulated devices at once: they wait for the same few cores.

    Of the largest measured number not above this one, in proportion beyond it; of one alone where no number
    was measured.
    """
    known = {1: calibration.launch_seconds, **calibration.launch_seconds_among}
    count = max(each for each in known if each <= num_devices)
    beyond = num_devices / count if calibration.launch_seconds_among and count == max(known) else 1.0
    return known[count] * beyond


def measured_attention(
    known: tuple[MeasuredAttention, ...], table: AttentionRate, head_size: int, length: int, backward: bool
) -> float:
    """FLOP/s of the measured head size nearest to this one, at this length.

    Between measured lengths: a straight line in the logarithms. Beyond them: the nearest measured rate, times
    what the table's curve, R(s) = R_inf s / (s + s_half), has at this length over what it has at that one.
    """
    nearest = min((each.head_size for each in known), key=lambda size: abs(size - head_size))
    rates = {
        each.length: each.backward_flops_per_second if backward else each.forward_flops_per_second
        for each in known
        if each.head_size == nearest
    }
    below = max((at for at in rates if at <= length), default=None)
    above = min((at for at in rates if at >= length), default=None)
    if below is None or above is None:
        at = above if below is None else below
        assert at is not None, "a calibration without attention is not asked"
        return rates[at] * _saturation(table, length) / _saturation(table, at)
    if below == above:
        return rates[below]
    share = math.log(length / below) / math.log(above / below)
    return rates[below] ** (1 - share) * rates[above] ** share


def _saturation(table: AttentionRate, length: int) -> float:
    return length / (length + table.half_length)


def words_of(calibration: Calibration, tables: str, *, simulated: bool) -> str:
    """Which figures a prediction took from the calibration, and which it took from `tables`.

    `simulated`: a CPU, of which nothing but the calibration is known.
    """
    formats = ", ".join(calibration.matmul_flops_per_second)
    measured = [f"large products in {formats}", "memory", "launches"]
    if calibration.attention:
        heads = sorted({each.head_size for each in calibration.attention})
        measured.append(f"attention with heads of {_listed(heads)}")
    groups: dict[tuple[int, ...], list[str]] = {}
    for kind in dict.fromkeys(each.kind for each in calibration.collectives):
        sizes = sorted({each.group_size for each in calibration.collectives if each.kind == kind})
        groups.setdefault(tuple(sizes), []).append(kind)
    measured += [f"{_listed(kinds)} among {_listed(sizes)}" for sizes, kinds in groups.items()]
    words = f"measured on {calibration.date} ({calibration.source}): {'; '.join(measured)}"
    if simulated:
        copied = "" if groups else "; collectives taken as copies through memory"
        return words + copied
    left = ["the shape of products"]
    left += [] if calibration.attention else ["attention"]
    left += ["other groups"] if groups else ["collectives"]
    return f"{words}; from {tables}: {_listed(left)}"


def _listed(items: list[str] | list[int] | tuple[int, ...]) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last
