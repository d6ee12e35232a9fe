"""What TPUs sustain in products, by published runs, and how far off each run is if the others alone set it.

Of each generation one figure is fitted, `sustained.GENERATION` in runs.toml, to the rows of its runs: the one
with the least squares of logarithmic errors, since the median of two rows is any figure between them. A blind
error is that of a row by all other rows of its generation; the only row of a generation is predicted with the
median share of peak of the others. Rows that are only seen, those of several slices, have no part in any fit.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from _published_blind import FACTORS, seconds
from _row_kinds import FITTED, kind_in

from meshwright.hardware import find_chip
from meshwright.predict import runs

NORMAL_95 = 1.645  # quantile of the normal distribution that 95 % lie below
Row = dict[str, Any]


def share_of(chip: str) -> float:
    """Return the share of its peak that products of a generation are priced at."""
    run = runs()["sustained"][chip]
    return float(run["flops_per_second"] / run["peak_flops_per_second"])


def fitted(rows: Sequence[Row]) -> float:
    """Return the factor on the seconds of products that is nearest to some rows."""
    off = np.array([np.log(seconds(row, FACTORS) / row["measured_seconds"]) for row in rows])
    return float(FACTORS[np.argmin((off**2).sum(axis=0))])


def in_the_fit(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to which rates are fitted."""
    return [row for row in rows if kind_in(row) == FITTED]


def fitted_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return the share of its peak that each generation sustains by its rows."""
    by_chip: dict[str, list[Row]] = defaultdict(list)
    for row in in_the_fit(rows):
        by_chip[row["chip"]].append(row)
    return {chip: share_of(chip) / fitted(own) for chip, own in sorted(by_chip.items())}


def with_blind_errors(rows: Sequence[Row]) -> list[Row]:
    """Return rows with `blind_error`, the error of a prediction in which the row had no part."""
    found = []
    for row in rows:
        others = [other for other in in_the_fit(rows) if other["chip"] == row["chip"] and other is not row]
        if others:
            factor = fitted(others)
        else:
            shares = fitted_shares([other for other in rows if other is not row])
            factor = share_of(row["chip"]) / statistics.median(shares.values())
        error = float(seconds(row, factor)) / row["measured_seconds"] - 1
        found.append({**row, "blind_error": round(error, 5)})
    return found


def interval_of(blind: Sequence[Row]) -> tuple[float, float]:
    """Return the ends that hold 90 % of measured / predicted, were the blind logarithms normal.

    A dozen rows have no quantiles of 5 and 95 %. The next row is one more draw than those that set the mean
    and the deviation, which widens the ends by the root of 1 + 1/n.
    """
    logs = [-math.log1p(row["blind_error"]) for row in in_the_fit(blind)]
    reach = NORMAL_95 * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle - reach), math.exp(middle + reach)


def other_interval(shares: Mapping[str, float], low: float, high: float) -> tuple[float, float]:
    """Return the ends for a generation without rows: those given, times the spread of the shares."""
    middle = runs()["other_tpus"]["share"]
    return low * middle / max(shares.values()), high * middle / min(shares.values())


def fit_of(rows: Sequence[Row], gpus: Mapping[str, float]) -> dict[str, Any]:
    """Return what runs.toml holds by these rows: rates, the share of other generations, the intervals.

    The share in runs.toml sets the second interval: fit again once it is there.

    Args:
        gpus: the interval of published runs on GPUs (`summary.interval` of a record), by which that of other
            programs is wider.
    """
    shares, blind = fitted_shares(rows), with_blind_errors(rows)
    low, high = interval_of(blind)
    others = other_interval(shares, low, high)
    peaks = {chip: find_chip(chip).peak_flops_per_second["bf16"] for chip in shares}
    return {
        "flops_per_second": {chip: float(f"{share * peaks[chip]:.3g}") for chip, share in shares.items()},
        "other_share": round(float(np.median(list(shares.values()))), 3),
        "interval": [round(low, 3), round(high, 3)],
        "other_interval": [round(end, 3) for end in others],
        "program_interval": [round(low * gpus["low"], 3), round(high * gpus["high"], 3)],
        "other_program_interval": [round(others[0] * gpus["low"], 3), round(others[1] * gpus["high"], 3)],
    }
