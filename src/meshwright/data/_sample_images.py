"""A small set of images in Fashion-MNIST's files, made by arithmetic: to try things without the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ._idx import CLASSES, write_images

SIDE = 28
ROWS = {"train": 4096, "held-out": 1024}
_COARSE = 7  # a class's shape is drawn on 7 x 7 fields of 4 x 4 pixels
_FARTHEST = 2  # pixels by which an image is moved
_SEED = 1


def write_sample_images(folder: Path) -> dict[str, int]:
    """Write the four files to `folder`: 4,096 images to train and 1,024 held out; rows by part.

    Every class has a shape of its own. An image is its class's, moved by up to two pixels each way, of a
    brightness of its own, with noise, so that classes can be told apart, though not each image with
    certainty. The same files each time.

    Raises:
        InputError: the folder cannot be made, or holds one of the files already.
    """
    random = np.random.Generator(np.random.PCG64(_SEED))
    shapes = random.random((CLASSES, _COARSE, _COARSE)) < 0.5
    pixels = np.kron(shapes, np.ones((SIDE // _COARSE, SIDE // _COARSE)))
    train, held_out = (_drawn(random, pixels, rows) for rows in ROWS.values())
    return write_images(folder, train=train, held_out=held_out)


def _drawn(random: np.random.Generator, pixels: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    labels = random.integers(CLASSES, size=rows)
    moves = random.integers(-_FARTHEST, _FARTHEST + 1, size=(rows, 2))
    brightness = random.uniform(80, 220, size=(rows, 1, 1))
    moved = np.stack(
        [np.roll(pixels[label], move, axis=(0, 1)) for label, move in zip(labels, moves, strict=True)]
    )
    noisy = moved * brightness + random.normal(0, 60, size=moved.shape)
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8), labels.astype(np.uint8)
