"""The two parts of any data, and the generator of one step of one part."""

from __future__ import annotations

from typing import Literal

import numpy as np

Split = Literal["train", "held-out"]
STREAMS: dict[Split, int] = {"train": 0, "held-out": 1}
_FIXED = 2
Rows = slice | np.ndarray
"""Which rows of a batch are asked for: all of it, or their numbers, ascending. They are what they would be in
the whole, whoever else makes the others."""
ALL = slice(None)


def generator(seed: int, step: int, split: Split) -> np.random.Generator:
    """Randomness that depends on these three alone, so that any step can be made again at any time."""
    return np.random.default_rng([seed, STREAMS[split], step])


def fixed_generator(seed: int) -> np.random.Generator:
    """Randomness of the seed alone: for what is the same in every step of both parts."""
    return np.random.default_rng([seed, _FIXED])
