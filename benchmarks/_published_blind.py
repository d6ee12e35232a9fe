"""Say how far off the predictions of a source are if its own rows had no part in the constants.

The constants that published runs set are what a chip sustains in products, one for each silicon. Without the
rows of a source, the figure is fitted again to all other rows of that silicon, and the source's rows are
predicted with it. What they wait for besides products stays as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from _published_interval import weights

FACTORS = np.linspace(0.8, 1.25, 91)  # of the seconds of products; 0.5 % apart
MOST_COUNTED = 30  # rows of one source
SILICON = {"A100": "A100", "H100": "Hopper", "H200": "Hopper", "H800": "Hopper", "V100": "V100"}
PRODUCTS = ("matmul",)


def silicon_of(chip: str) -> str:
    """Return the name that chips of one silicon share; the chip's own where no figure is shared.

    >>> silicon_of("H100-PCIe"), silicon_of("B200")
    ('Hopper', 'B200')
    """
    return SILICON.get(chip.partition("-")[0], chip)


def with_blind_errors(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return scored rows with `blind_error`: that of a prediction fitted to all other sources.

    A row whose silicon no other source has keeps its error: no row of its own set its constants either, or
    there is nothing to set them with.
    """
    by_silicon: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_silicon[silicon_of(row["chip"]) if row["sustained"] else ""].append(row)
    blind: dict[str, float] = {row["id"]: row["error"] for row in rows}
    for silicon, own in by_silicon.items():
        for source in {row["source"] for row in own} if silicon else ():
            others = [row for row in own if row["source"] != source]
            if others:
                factor = fitted(others)
                for row in own:
                    if row["source"] == source:
                        blind[row["id"]] = float(seconds(row, factor) / row["measured_seconds"] - 1)
    return [{**row, "blind_error": round(blind[row["id"]], 5)} for row in rows]


def seconds(row: dict[str, Any], factor: float | np.ndarray[Any, Any]) -> Any:
    """Return a row's predicted seconds if its silicon's products took `factor` times as long.

    A row that was predicted with several figures has `seconds_by_factor`: products that the figure does not
    bound keep their time there. In others all products take `factor` times as long.
    """
    if by_factor := row.get("seconds_by_factor"):
        known = sorted((float(tried), found) for tried, found in by_factor.items())
        return np.interp(factor, [tried for tried, _ in known], [found for _, found in known])
    products = sum(row["exposed_seconds"].get(name, 0.0) for name in PRODUCTS)
    return row["predicted_seconds"] + (factor - 1) * products


def fitted(rows: Sequence[dict[str, Any]]) -> float:
    """Return the factor with the least mean absolute logarithmic error, no source counting for too many."""
    weight = weights([row["source"] for row in rows], MOST_COUNTED)
    off = np.array([np.abs(np.log(seconds(row, FACTORS) / row["measured_seconds"])) for row in rows])
    return float(FACTORS[np.argmin(weight @ off)])
