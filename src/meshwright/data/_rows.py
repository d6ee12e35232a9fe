"""Rows for regression, made from the seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._split import ALL, Rows, Split, generator


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionRows:
    """Standard normal inputs; targets are inputs . [0, 1, ..., D-1] without noise, or normal as well.

    `has_answer`: whether the targets follow from the inputs.
    """

    seed: int
    rows: int
    dim: int
    has_answer: bool

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """`inputs` float32 [rows, dim] and `targets` float32 [rows]."""
        random = generator(self.seed, step, split)
        inputs = random.standard_normal((self.rows, self.dim), dtype=np.float32)
        if self.has_answer:
            targets = inputs @ np.arange(self.dim, dtype=np.float32)
        else:
            targets = random.standard_normal(self.rows, dtype=np.float32)
        return {"inputs": inputs[rows], "targets": targets[rows]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRows:
    """Points about a line: slope x + intercept + noise x a standard normal number, x standard normal."""

    seed: int
    rows: int
    slope: float
    intercept: float
    noise: float

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """`inputs` float32 [rows, 1] and `targets` float32 [rows]."""
        random = generator(self.seed, step, split)
        inputs = random.standard_normal((self.rows, 1), dtype=np.float32)
        off = random.standard_normal(self.rows, dtype=np.float32)
        targets = np.float32(self.slope) * inputs[:, 0] + np.float32(self.intercept)
        return {"inputs": inputs[rows], "targets": (targets + np.float32(self.noise) * off)[rows]}
