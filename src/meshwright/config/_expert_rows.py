"""State the sizes of experts' buffers where nothing is dropped, for the step and for its estimates."""

from __future__ import annotations

from typing import Any

TILE_ROWS = 128
"""The most rows of a tile. Each expert's rows fill whole tiles, the last of them in part.

Of 64 and 128 rows the latter is faster on an H200 even for 256 rows of an expert: 384 and 345 TFLOP/s."""
LEAST_SPARE = 1 / 8
"""The spare rows of a pair of devices, over its even share, where the shares are large: a choice."""
SIGMAS = 5.0
"""The spare rows in standard deviations of even chances, where the shares are small: a choice."""


def sent_rows(fair: Any) -> Any:
    """Return how many rows a device may send another at first, where `fair` of its choices are an even share.

    An eighth more than the share. Small shares vary more, and have five standard deviations: with even
    chances one pair of devices in three million needs more. Numbers or arrays.

    >>> round(sent_rows(4096)), round(sent_rows(512))
    (4608, 625)
    """
    least, varying = LEAST_SPARE * fair, SIGMAS * fair**0.5
    return fair + (least + varying + abs(least - varying)) / 2
