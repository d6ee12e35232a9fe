"""Labelled images: made from the seed, or from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ._idx import CLASSES, IdxPart
from ._order import windows_at
from ._split import ALL, Rows, Split, fixed_generator, generator


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImages:
    """Each class has a pattern of standard normal pixels; an image is its class's plus as much noise."""

    seed: int
    rows: int
    side: int

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """`images` float32 [rows, 1, side, side] and `labels` int32 [rows], below 10."""
        shape = (1, self.side, self.side)
        patterns = fixed_generator(self.seed).standard_normal((CLASSES, *shape), dtype=np.float32)
        random = generator(self.seed, step, split)
        labels = random.integers(CLASSES, size=self.rows, dtype=np.int32)
        noise = random.standard_normal((self.rows, *shape), dtype=np.float32)
        return {"images": patterns[labels[rows]] + noise[rows], "labels": labels[rows]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """Epochs over images of files, resized to `side`.

    An epoch of training takes each image once, in an order of its own; held-out images come in the files'
    order, first to last. An epoch's last batch has the rows that are left, then rows of weight zero.
    `evaluation_batches`: how many held-out batches are judged together.
    """

    parts: Mapping[Split, IdxPart]
    seed: int
    rows: int
    side: int
    evaluation_batches: int

    def steps_per_epoch(self, split: Split) -> int:
        """Batches in which each image of a part comes once."""
        return -(-len(self.parts[split].labels) // self.rows)

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """`images` float32 [rows, 1, side, side] of 0 to 1, `labels` int32 [rows] below 10, `weights` float32
        [rows]. Reads these rows alone.

        In training the weights make the plain mean over the batch that over its images. Held-out ones
        make the plain mean over the first `evaluation_batches` batches that over all their images.
        """
        part, chosen = self.parts[split], self._chosen(step, split)
        weight = self.rows / len(chosen) if split == "train" else self._held_out_weight()
        places = np.arange(self.rows)[rows]
        chosen = chosen[places[places < len(chosen)]]
        missing = len(places) - len(chosen)
        images = resized(part.images[chosen], self.side).astype(np.float32)[:, None] / np.float32(255)
        return {
            "images": np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0))),
            "labels": np.pad(part.labels[chosen].astype(np.int32), (0, missing)),
            "weights": np.pad(np.full(len(chosen), weight, np.float32), (0, missing)),
        }

    def _count(self, step: int, split: Split) -> int:
        """Images in the batch of a step."""
        start = step % self.steps_per_epoch(split) * self.rows
        return min(self.rows, len(self.parts[split].labels) - start)

    def _chosen(self, step: int, split: Split) -> np.ndarray:
        size, (epoch, place) = len(self.parts[split].labels), divmod(step, self.steps_per_epoch(split))
        first, count = place * self.rows, self._count(step, split)
        if split == "held-out":
            return np.arange(first, first + count)
        return windows_at(epoch * size + first, count, size=size, seed=self.seed, split=split)

    def _held_out_weight(self) -> float:
        count = sum(self._count(step, "held-out") for step in range(self.evaluation_batches))
        return self.evaluation_batches * self.rows / count


def resized(images: np.ndarray, side: int) -> np.ndarray:
    """uint8 [rows, height, width] to float32 [rows, side, side], bilinear between the centres of pixels.

    As `torch.nn.functional.interpolate(mode="bilinear", align_corners=False)`: at the border the nearest
    pixel, and no smoothing where an image is made smaller. Images of that size are not touched.
    """
    if images.shape[1:] == (side, side):
        return images.astype(np.float32)
    down, across = (_mixture(size, side) for size in images.shape[1:])
    return down @ images.astype(np.float32) @ across.T


def _mixture(size: int, side: int) -> np.ndarray:
    """float32 [side, size]: how much of each of `size` pixels is in each of `side`; rows sum to 1."""
    centres = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    below = np.minimum(centres.astype(np.int64), max(size - 2, 0))
    share = (centres - below).astype(np.float32)
    places, shares = np.arange(side), np.zeros((side, size), np.float32)
    shares[places, below] = 1 - share
    shares[places, np.minimum(below + 1, size - 1)] += share
    return shares
