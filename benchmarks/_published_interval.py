"""How wide an interval is that holds nine published runs of ten, and how many of a source it never saw.

Rows of one source err together, and one source has most of the rows: quantiles over all rows would be that
source's alone. So each source counts for at most so many rows, whatever their number.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

TAIL = 0.05  # below and above
MOST_COUNTED = 30  # rows of one source, in the quantiles
MOST_DRAWN = 15  # of one source, in a draw


def weights(sources: list[str], most: int) -> NDArray[np.float64]:
    """By row: 1, or less where its source has more than `most` rows."""
    count = Counter(sources)
    return np.array([min(count[source], most) / count[source] for source in sources])


def quantiles(ratios: NDArray[np.float64], sources: list[str]) -> tuple[float, float]:
    """The 5 and 95 % quantiles of measured / predicted, each row at the middle of its own weight."""
    order = np.argsort(ratios)
    weight = weights(sources, MOST_COUNTED)[order]
    middle = (np.cumsum(weight) - weight / 2) / weight.sum()
    low, high = np.interp([TAIL, 1 - TAIL], middle, np.log(ratios[order]))
    return float(np.exp(low)), float(np.exp(high))


def interval_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The interval as shares of the predicted time, and which share of rows it holds.

    `left_out_...`: each row by the quantiles of all other sources, absent where there is one source;
    `..._drawn`: with no source counting for more than 15, as in a draw.
    """
    sources = [row["source"] for row in rows]
    ratios = np.array([1 / (1 + row["error"]) for row in rows])
    low, high = quantiles(ratios, sources)
    held = (low <= ratios) & (ratios <= high)
    drawn = weights(sources, MOST_DRAWN)
    found = {
        "rows": len(rows),
        "low": low,
        "high": high,
        "holds": held.mean(),
        "holds_drawn": np.average(held, weights=drawn),
    }
    if len(set(sources)) > 1:
        left_out = _left_out(ratios, sources)
        found["left_out_holds"] = left_out.mean()
        found["left_out_holds_drawn"] = np.average(left_out, weights=drawn)
    return {name: round(float(value), 3) for name, value in found.items()}


def _left_out(ratios: NDArray[np.float64], sources: list[str]) -> NDArray[np.bool_]:
    """Return whether each row lies within the quantiles of all sources but its own."""
    held = np.zeros(len(ratios), bool)
    for source in set(sources):
        own = np.array([each == source for each in sources])
        least, most = quantiles(ratios[~own], [each for each in sources if each != source])
        held[own] = (least <= ratios[own]) & (ratios[own] <= most)
    return held
