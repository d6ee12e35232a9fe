"""Labelled images, made from the seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._split import Split, fixed_generator, generator

CLASSES, SIDE = 10, 28


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImages:
    """Each class has a pattern of standard normal pixels; an image is its class's plus as much noise."""

    seed: int
    rows: int

    def batch(self, step: int, split: Split) -> dict[str, np.ndarray]:
        """`images` float32 [rows, 1, 28, 28] and `labels` int32 [rows], below 10."""
        patterns = fixed_generator(self.seed).standard_normal((CLASSES, 1, SIDE, SIDE), dtype=np.float32)
        random = generator(self.seed, step, split)
        labels = random.integers(CLASSES, size=self.rows, dtype=np.int32)
        noise = random.standard_normal((self.rows, 1, SIDE, SIDE), dtype=np.float32)
        return {"images": patterns[labels] + noise, "labels": labels}
