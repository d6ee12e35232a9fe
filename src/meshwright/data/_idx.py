"""Images and labels in IDX files, the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist/).

Big-endian: a magic number whose last two bytes are the type (8: unsigned bytes) and the number of
dimensions, each dimension's size as 32 bits, then the numbers.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.errors import InputError

from ._split import Split

NAMES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "held-out": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CLASSES = 10
_UNSIGNED_BYTES = 0x08


@dataclass(frozen=True, slots=True, kw_only=True)
class IdxPart:
    """One part of a folder: `images` uint8 [rows, height, width] and `labels` uint8 [rows], below 10."""

    images: np.ndarray
    labels: np.ndarray


def idx_parts(folder: Path) -> dict[Split, IdxPart]:
    """Both parts of a folder of four files, each plain or with `.gz` behind its name.

    Raises:
        InputError: a file that is absent, cut short, too long or of another kind; images and labels that
            do not go together; a label that is none of the ten.
    """
    idx_files(folder)
    return {split: _part(folder, *names) for split, names in NAMES.items()}


def idx_files(folder: Path) -> list[Path]:
    """Return the four files of a folder, in the order of `NAMES`.

    Raises:
        InputError: some are absent; all of those are named.
    """
    every = [name for names in NAMES.values() for name in names]
    found = {name: _found(folder, name) for name in every}
    absent = [name for name, path in found.items() if path is None]
    if absent:
        raise InputError(
            f"data.folder: {folder} has no {', '.join(absent)}",
            hint=f"put the four files there, plain or with .gz: {', '.join(every)}; or make a small set of "
            f"the same format: meshwright data sample-images --to {folder}",
        )
    return [path for path in found.values() if path is not None]


def _part(folder: Path, images_name: str, labels_name: str) -> IdxPart:
    images, labels = read_idx(folder, images_name, 3), read_idx(folder, labels_name, 1)
    if len(images) != len(labels) or not len(images):
        raise InputError(
            f"{folder}: {images_name} has {len(images)} images and {labels_name} {len(labels)} labels",
            hint="copy both again, from one source",
        )
    if labels.max() >= CLASSES:
        raise InputError(
            f"{folder}: {labels_name} holds label {labels.max()}; the models tell {CLASSES} classes apart",
            hint=f"labels are 0 to {CLASSES - 1}",
        )
    return IdxPart(images=images, labels=labels)


def _found(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(folder: Path, name: str, dims: int) -> np.ndarray:
    """The unsigned bytes of a file that is there, shaped as its header says: `dims` dimensions.

    Raises:
        InputError: no such IDX file, or its size is not what its header says.
    """
    path = _found(folder, name)
    assert path is not None, f"{folder / name} was looked for before"
    again = "copy it again"
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is no whole gzip file: {error}", hint=again) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="name a folder you may read") from None
    head = 4 + 4 * dims
    wanted = bytes((0, 0, _UNSIGNED_BYTES, dims))
    if raw[:4] != wanted:
        raise InputError(
            f"{path} begins with {raw[:4].hex(' ') or 'nothing'}, and an IDX file of {dims} dimension"
            f"{'s' * (dims > 1)} of bytes with {wanted.hex(' ')}",
            hint="it is another file" if path.suffix == ".gz" else "it is another file, or still compressed",
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
    """`array` of unsigned bytes as an IDX file, the same each time; gzipped where the name ends in `.gz`."""
    assert array.dtype == np.uint8, f"{array.dtype} is not written"
    header = bytes((0, 0, _UNSIGNED_BYTES, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    raw = header + array.tobytes()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)


def write_images(
    folder: Path, *, train: tuple[np.ndarray, np.ndarray], held_out: tuple[np.ndarray, np.ndarray]
) -> dict[str, int]:
    """Write images of ten classes as the four gzipped files of MNIST; return the rows of each part.

    Args:
        folder: made where it is missing.
        train, held_out: images uint8 [rows, height, width] and their labels, uint8 [rows], below 10.

    Raises:
        InputError: images and labels do not go together; the folder holds one of the files already, or
            cannot be written.
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
