"""How wide an interval is that holds nine published runs of ten, and how many of a source it never saw.

Rows of one source err together, and one source has most of the rows: quantiles over all rows would be that
source's alone. So each source counts for at most so many rows, whatever their number.

A row's interval has a width by what is known before the run (`width`: chip, format, experts), and is wider
for the share of the step that waits for messages (`predict.ends_with_waits`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.predict import ends_with_waits, widths

TAIL = 0.05  # below and above
MOST_COUNTED = 30  # rows of one source, in the quantiles
MOST_DRAWN = 15  # of one source, in a draw
FEWEST_OTHERS = 15  # rows of other sources from which a width is taken; fewer are no class of their own


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


def waits_in(exposed_seconds: Mapping[str, float]) -> float:
    """Return the seconds of a step that wait for messages."""
    return math.fsum(seconds for name, seconds in exposed_seconds.items() if "[" in name)


def ends_of(names: Sequence[str], waits: float) -> tuple[float, float]:
    """Return the ends of the interval of these widths, the widest of them, as shares of the expected time.

    Args:
        waits: the share of our program's step that waits for messages.
    """
    applied = [widths()[name] for name in names]
    return ends_with_waits(min(each.low for each in applied), max(each.high for each in applied), waits)


def with_left_out(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return scored rows with `holds_left_out`: within a width that other sources' rows of its class give.

    A class is a width's name. Where other sources have fewer than 15 rows of it, it has the width of all
    their rows without experts; a row with experts then has none, and no `holds_left_out`. Errors are blind.
    """
    found: list[dict[str, Any]] = []
    of_source: dict[tuple[str, tuple[str, ...]], tuple[float, float] | None] = {}
    for row in rows:
        if "holds" not in row or "width" not in row:
            found.append(row)
            continue
        key = row["source"], tuple(row["width"])
        if key not in of_source:
            of_source[key] = _ends_without(rows, *key)
        ends = of_source[key]
        if ends is None:
            found.append(row)
            continue
        low, high = ends_with_waits(*ends, _share_of_waits(row))
        found.append({**row, "holds_left_out": low <= _ratio(row) <= high})
    return found


def _ends_without(
    rows: Sequence[dict[str, Any]], source: str, names: tuple[str, ...]
) -> tuple[float, float] | None:
    """Return a width's ends by the rows of other sources; None where they say nothing of it."""
    others = [row for row in rows if row["source"] != source and "width" in row]
    own = [row for row in others if tuple(row["width"]) == names]
    if len(own) < FEWEST_OTHERS:
        if "experts" in names:
            return None
        own = [row for row in others if "experts" not in row["width"]]
    ratios = np.array([_beside_waits(row) for row in own])
    low, high = quantiles(ratios, [row["source"] for row in own])
    return min(low, 1.0), max(high, 1.0)


def _ratio(row: Mapping[str, Any]) -> float:
    return float(1 / (1 + row.get("blind_error", row["error"])))


def _share_of_waits(row: Mapping[str, Any]) -> float:
    ours = row["predicted_seconds"] - sum(row["otherwise_seconds"].values())
    return waits_in(row["exposed_seconds"]) / ours


def _beside_waits(row: Mapping[str, Any]) -> float:
    """Return measured / predicted with what its waits alone allow taken off, as `ends_with_waits` adds it."""
    size = math.log(_ratio(row))
    allowed = [abs(math.log(end)) for end in ends_with_waits(1.0, 1.0, _share_of_waits(row))][size > 0]
    return math.exp(math.copysign(math.sqrt(max(size**2 - allowed**2, 0.0)), size))
