"""Say how far off the predictions of a source are if its own rows had no part in the constants.

The constants that published runs set are the shares of a chip's products that kinds of software reach
(`[[software]]` of published_assumptions.toml). Without the rows of a source, the share is fitted again to all other rows
of that software, and the source's rows are predicted with it; with the chip's own rate if no other source has that
software. What they wait for besides products stays as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from _published_interval import weights

FACTORS = np.linspace(0.7, 1.35, 131)  # of the seconds of products; 0.5 % apart
MOST_COUNTED = 30  # rows of one source
PRODUCTS = ("matmul",)


def with_blind_errors(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return scored rows with `blind_error`: that of a prediction fitted to all other sources.

    A row whose software has no share keeps its error: no row set a constant of it.
    """
    by_software: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_software[row.get("software", "")].append(row)
    blind: dict[str, float] = {row["id"]: row["error"] for row in rows}
    for software, own in by_software.items():
        for source in {row["source"] for row in own} if software else ():
            others = [row for row in own if row["source"] != source]
            factor = fitted(others) if others else own[0]["products"]
            for row in own:
                if row["source"] == source:
                    blind[row["id"]] = float(seconds(row, factor) / row["measured_seconds"] - 1)
    return [{**row, "blind_error": round(blind[row["id"]], 5)} for row in rows]


def seconds(row: dict[str, Any], factor: float | np.ndarray[Any, Any]) -> Any:
    """Return a row's predicted seconds if its products took `factor` times as long as predicted."""
    products = sum(row["exposed_seconds"].get(name, 0.0) for name in PRODUCTS) / row.get("products", 1.0)
    return row["predicted_seconds"] + (factor - 1) * products


def fitted(rows: Sequence[dict[str, Any]]) -> float:
    """Return the factor with the least mean absolute logarithmic error, no source counting for too many."""
    weight = weights([row["source"] for row in rows], MOST_COUNTED)
    off = np.array([np.abs(np.log(seconds(row, FACTORS) / row["measured_seconds"])) for row in rows])
    return float(FACTORS[np.argmin(weight @ off)])
