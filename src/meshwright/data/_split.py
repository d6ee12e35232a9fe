"""The two parts of any data, and the generator of one step of one part."""

from __future__ import annotations

from typing import Literal

import numpy as np

Split = Literal["train", "held-out"]
_STREAMS: dict[Split, int] = {"train": 0, "held-out": 1}


def generator(seed: int, step: int, split: Split) -> np.random.Generator:
    """Randomness that depends on these three alone, so that any step can be made again at any time."""
    return np.random.default_rng([seed, _STREAMS[split], step])
