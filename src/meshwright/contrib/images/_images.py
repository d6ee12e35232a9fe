"""Read labelled images from IDX files, write such files, or generate images from a seed.

`open_images` makes `ImageFiles` or `LabelledImages` for the image models. `write_sample_images` writes a
small artificial data set under Fashion-MNIST's file names, for trials without the real images.

IDX is the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist/). All numbers are big-endian.
A file begins with four bytes of magic number; the last two are the type (8: unsigned bytes) and the number of
dimensions. The size of each dimension follows as 32 bits, then the numbers themselves.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.config import IdxData, RunConfig
from meshwright.errors import InputError
from meshwright.files import read_bytes, read_gzip, reason
from meshwright.trainer.data import ALL, Dataset, Rows, Split, fixed_generator, generator, windows_at

NAMES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "held-out": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CLASSES = 10
_UNSIGNED_BYTES = 0x08
_MOST_BYTES = 2**33  # of one file, which is held in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class IdxPart:
    """One split of a folder: `images` uint8 [rows, height, width] and `labels` uint8 [rows], below 10."""

    images: np.ndarray
    labels: np.ndarray


def open_images(config: RunConfig) -> Dataset:
    """Return the data set of a run whose model takes images."""
    data, rows, side = config.data, config.batch.sequences, config.model.sizes.input_shape[-1]
    if not isinstance(data, IdxData):
        return LabelledImages(seed=config.seed, rows=rows, side=side)
    parts, batches = idx_parts(Path(data.folder)), config.evaluation.batches
    return ImageFiles(parts=parts, seed=config.seed, rows=rows, side=side, evaluation_batches=batches)


def files_of(data: IdxData) -> list[Path]:
    """Return the files that data are read from, in order."""
    return _idx_files(Path(data.folder))


def idx_parts(folder: Path) -> dict[Split, IdxPart]:
    """Read both splits from a folder of four files, each plain or with `.gz` appended to its name."""
    _idx_files(folder)
    parts: dict[Split, IdxPart] = {}
    for split, (images_name, labels_name) in NAMES.items():
        images, labels = read_idx(folder, images_name, 3), read_idx(folder, labels_name, 1)
        if len(images) != len(labels) or not len(images):
            raise InputError(
                f"{folder}: {images_name} has {len(images)} images and {labels_name} {len(labels)} labels",
                hint="copy both again, from one source",
            )
        if labels.max() >= CLASSES:
            raise InputError(
                f"{folder}: {labels_name} holds label {labels.max()}; the models know {CLASSES} classes",
                hint=f"labels are 0 to {CLASSES - 1}",
            )
        parts[split] = IdxPart(images=images, labels=labels)
    return parts


def _idx_files(folder: Path) -> list[Path]:
    """Return the four files of a folder, in the order of `NAMES`."""
    every = [name for names in NAMES.values() for name in names]
    paths = {name: _path(folder, name) for name in every}
    absent = [name for name, path in paths.items() if path is None]
    if absent:
        raise InputError(
            f"data.folder: {folder} has no {', '.join(absent)}",
            hint=f"put the four files there, plain or with .gz: {', '.join(every)}; or make a small set of "
            f"the same format: meshwright data sample-images --to {folder}",
        )
    return [path for path in paths.values() if path is not None]


def _path(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(folder: Path, name: str, dims: int) -> np.ndarray:
    """Return the unsigned bytes of an existing file, shaped as its header says, with `dims` dimensions."""
    path = _path(folder, name)
    assert path is not None, f"{folder / name} was looked for before"
    again, is_packed = "copy it again", path.suffix == ".gz"
    try:
        raw = (read_gzip if is_packed else read_bytes)(path, _MOST_BYTES)
    except ValueError as error:
        raise InputError(f"{path}: {error}", hint=again) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason(error)}", hint="name a folder you may read") from None
    head = 4 + 4 * dims
    wanted = bytes((0, 0, _UNSIGNED_BYTES, dims))
    if raw[:4] != wanted:
        raise InputError(
            f"{path} begins with {raw[:4].hex(' ') or 'nothing'}, and an IDX file of {dims} dimension"
            f"{'s' * (dims > 1)} of bytes with {wanted.hex(' ')}",
            hint="it is another file" if is_packed else "it is another file, or still compressed",
        )
    if len(raw) < head:
        raise InputError(f"{path} is cut short: {len(raw)} bytes, and its header has {head}", hint=again)
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dims, 4))
    if len(raw) != head + math.prod(shape):
        sizes = " x ".join(map(str, shape))
        raise InputError(
            f"{path}: {len(raw) - head} bytes follow its header, which says {sizes} = {math.prod(shape)}",
            hint=again,
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write `array` of unsigned bytes as an IDX file, gzipped if the name ends in `.gz`.

    Equal arrays make identical files.
    """
    assert array.dtype == np.uint8, f"{array.dtype} is not written"
    header = bytes((0, 0, _UNSIGNED_BYTES, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    raw = header + array.tobytes()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)


def write_images(
    folder: Path, *, train: tuple[np.ndarray, np.ndarray], held_out: tuple[np.ndarray, np.ndarray]
) -> dict[str, int]:
    """Write images of ten classes as the four gzipped files of MNIST; return the number of rows by split.

    Args:
        folder: created if missing.
        train, held_out: images uint8 [rows, height, width] and their labels, uint8 [rows], below 10.

    Raises:
        InputError: images and labels do not match; the folder already holds one of the files, or cannot be
            written.
    """
    there = [path.name for names in NAMES.values() for name in names for path in folder.glob(f"{name}*")]
    if there:
        raise InputError(f"{folder} holds {', '.join(there)} already", hint="name another folder")
    for part, (images, labels) in (("train", train), ("held_out", held_out)):
        fits = images.ndim == 3 and labels.shape == images.shape[:1] and len(labels)
        if not fits or {images.dtype, labels.dtype} != {np.dtype(np.uint8)} or labels.max() >= CLASSES:
            raise InputError(
                f"{part}: images {images.dtype}{list(images.shape)} with labels "
                f"{labels.dtype}{list(labels.shape)} are not ten classes of images",
                hint="give images uint8 [rows, height, width] and labels uint8 [rows] from 0 to 9",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for names, arrays in zip(NAMES.values(), (train, held_out), strict=True):
            for name, array in zip(names, arrays, strict=True):
                write_idx(folder / f"{name}.gz", array)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}", hint="name another folder") from None
    return {split: len(labels) for split, (_, labels) in zip(NAMES, (train, held_out), strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImages:
    """Images of ten classes: a class's fixed pattern of standard normal pixels plus standard normal noise."""

    seed: int
    rows: int
    side: int

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return `images` float32 [rows, 1, side, side] and `labels` int32 [rows], below 10."""
        shape = (1, self.side, self.side)
        patterns = fixed_generator(self.seed).standard_normal((CLASSES, *shape), dtype=np.float32)
        random = generator(self.seed, step, split)
        labels = random.integers(CLASSES, size=self.rows, dtype=np.int32)
        noise = random.standard_normal((self.rows, *shape), dtype=np.float32)
        return {"images": patterns[labels[rows]] + noise[rows], "labels": labels[rows]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """Epochs over the images of files, resized to `side`.

    A training epoch takes each image once, in an order that differs between epochs. Held-out images come in
    the order of the files. The last batch of an epoch holds the remaining images, then padding rows of weight
    zero. `evaluation_batches`: the number of held-out batches in one evaluation.
    """

    parts: Mapping[Split, IdxPart]
    seed: int
    rows: int
    side: int
    evaluation_batches: int

    def steps_per_epoch(self, split: Split) -> int:
        """Return the number of batches in which each image of a split comes once."""
        return -(-len(self.parts[split].labels) // self.rows)

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return some rows of a step's batch, reading only those images.

        `images` are float32 [rows, 1, side, side] from 0 to 1, `labels` int32 [rows] below 10, and `weights`
        float32 [rows]. In training, the mean of weighted rows over the batch equals the plain mean over its
        images. For held-out data, the mean of weighted rows over the first `evaluation_batches` batches
        equals the plain mean over all their images.
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
        """Count the images in the batch of a step."""
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
    """Resize uint8 [rows, height, width] to float32 [rows, side, side], bilinearly between pixel centres.

    Equals `torch.nn.functional.interpolate(mode="bilinear", align_corners=False)`: the border repeats the
    nearest pixel, and shrinking does no smoothing. Images that already have this size keep their values.
    """
    if images.shape[1:] == (side, side):
        return images.astype(np.float32)
    down, across = (_mixture(size, side) for size in images.shape[1:])
    return down @ images.astype(np.float32) @ across.T


def _mixture(size: int, side: int) -> np.ndarray:
    """Return float32 [side, size]: the share of each of `size` pixels in each of `side`; rows sum to 1."""
    centres = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    below = np.minimum(centres.astype(np.int64), max(size - 2, 0))
    share = (centres - below).astype(np.float32)
    places, shares = np.arange(side), np.zeros((side, size), np.float32)
    shares[places, below] = 1 - share
    shares[places, np.minimum(below + 1, size - 1)] += share
    return shares


SIDE = 28
ROWS = {"train": 4096, "held-out": 1024}
_COARSE = 7  # a class's pattern has 7 x 7 squares of 4 x 4 pixels
_FARTHEST = 2  # the largest shift of an image, in pixels
_SEED = 1


def write_sample_images(folder: Path) -> dict[str, int]:
    """Write four files with 4,096 training and 1,024 held-out images; return the number of rows by split.

    Every class has its own pattern. An image is its class's pattern, shifted by up to two pixels along each
    dimension, with a random brightness and noise. So the classes can be distinguished, but not every image
    with certainty. The files are the same each time.

    Raises:
        InputError: the folder cannot be created, or already holds one of the files.
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
