"""Notice that a bare file of token ids is read in the wrong width, or holds no ids at all.

Nothing in such a file says its type, and a wrong one gives ids that train without a word. But the bytes show
it: read in half their width, every second id is 0 or nearly so; read in twice their width, ids exceed the
vocabulary; text and the files of other programs begin as those do. Three samples of a file are looked at.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError

_SAMPLE_BYTES = 1 << 16  # each of three samples; a multiple of the widest id
_LEAST_BYTES = 256  # fewer bytes show nothing
_MOST_UPPER = 15  # ids below 2**20 have no larger upper half
_VARIED = 8  # lower halves have this many times more values than upper halves may have
_MAGIC = {
    b"\x93NUMPY": ("NumPy's .npy", "write the ids alone: numpy.load(FILE).astype('uint16').tofile(OTHER)"),
    b"PK\x03\x04": ("a zip archive, as torch.save and numpy.savez write", "write the ids alone, by tofile"),
    b"PAR1": ("Parquet", 'name it with --data, or use data.source = "text"'),
    b"\x1f\x8b": ("compressed by gzip", "unpack it first"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it first"),
}
_IS_TEXT = 'name it with --data, or use data.source = "text"'


def check_width(path: Path, dtype: str, vocab_size: int) -> None:
    """Raise if the bytes of a bare file of ids are not of a type, or are no ids.

    Raises:
        InputError: they are of another width or byte order, text, or another program's file.
    """
    sample = _sample(path)
    _check_kind(path, sample)
    if len(sample) < _LEAST_BYTES:
        return
    why = _wide(sample, np.dtype(dtype).itemsize)
    if why:
        narrow, wide = np.dtype(dtype).itemsize, 2 * np.dtype(dtype).itemsize
        if narrow == 2 and _wide(sample, 4):
            wide = 8
        raise InputError(
            f"{path} is read as {dtype}, and {why}: its ids have {wide} bytes each",
            hint=f'use data.dtype = "uint32", which metadata in {path.name}.json would say'
            if wide == 4
            else "types of 8 bytes are not read: write the ids again, as .astype('uint32').tofile does",
        )
    ids = np.frombuffer(sample, np.dtype(dtype).newbyteorder("<")).astype(np.int64)
    if int(ids.max()) >= vocab_size:
        _refuse_outside(path, dtype, sample, int(ids.max()), vocab_size)


def shown_dtype(path: Path, vocab_size: int) -> str:
    """Return the type of a bare file's ids that its bytes show: uint16 unless they are wider.

    Raises:
        InputError: the bytes are of no type that is read, or are no ids.
    """
    sample = _sample(path)
    dtype = "uint32" if len(sample) % 4 == 0 and _wide(sample, 2) else "uint16"
    check_width(path, dtype, vocab_size)
    return dtype


def is_binary(path: Path) -> bool:
    """Return whether a file holds zero bytes, as ids of two bytes and more do and no text does.

    Raises:
        InputError: the file cannot be read.
    """
    return b"\0" in _sample(path)


def _sample(path: Path) -> bytes:
    """Return the first, middle and last bytes of a file, each from a multiple of the widest id."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            starts = (0, size // 2, max(size - _SAMPLE_BYTES, 0))
            aligned = dict.fromkeys(start - start % 8 for start in starts)
            if size <= 3 * _SAMPLE_BYTES:
                whole = file.read()
                return whole[: len(whole) - len(whole) % 8] or whole
            parts: list[bytes] = []
            for start in aligned:
                file.seek(start)
                part = file.read(_SAMPLE_BYTES)
                parts.append(part[: len(part) - len(part) % 8])
            return b"".join(parts)
    except OSError as refused:
        raise InputError(
            f"cannot read {path}: {refused.strerror}", hint="name a file that you may read"
        ) from refused


def _check_kind(path: Path, sample: bytes) -> None:
    """Raise if a file is another program's, or text."""
    for magic, (kind, hint) in _MAGIC.items():
        if sample.startswith(magic):
            raise InputError(f"{path} is no raw file of tokens: it is {kind}", hint=hint)
    if len(sample) >= _LEAST_BYTES and _is_text(sample):
        raise InputError(f"{path} is no raw file of tokens: it is text", hint=_IS_TEXT)


def _is_text(sample: bytes) -> bool:
    """Return whether all bytes are those of text; ids of two bytes or more hold zeros, or no UTF-8."""
    values = np.frombuffer(sample, np.uint8)
    if ((values < 32) & ~np.isin(values, (9, 10, 12, 13))).any() or len(np.unique(values)) < _VARIED:
        return False
    try:
        sample[:_SAMPLE_BYTES].decode("utf-8")
    except UnicodeDecodeError as wrong:
        return wrong.start > _SAMPLE_BYTES - 8  # the sample may end within a character
    return True


def _wide(sample: bytes, itemsize: int) -> str:
    """Say how halves of wider ids show, where a sample is read as ids of `itemsize` bytes; "" if they do not.

    Of each pair the second is the upper half: 0 for ids below 2**16, and 0 or 1 for ids below 2**17.
    """
    if len(sample) < _LEAST_BYTES:
        return ""
    halves: Any = np.frombuffer(sample[: len(sample) - len(sample) % (2 * itemsize)], f"<u{itemsize}")
    lower, upper = halves[0::2], halves[1::2]
    most = int(upper.max())
    if most == 0:
        return "every second id is 0" if lower.any() else ""
    if most <= _MOST_UPPER and len(np.unique(lower)) > _VARIED * (most + 1):
        most_words = "0 or 1" if most == 1 else f"at most {most}"
        return f"every second id is {most_words}, while the others reach {int(lower.max())}"
    return ""


def _refuse_outside(path: Path, dtype: str, sample: bytes, largest: int, vocab_size: int) -> None:
    """Raise if ids that exceed the vocabulary would not in another type or byte order."""
    whole = sample[: len(sample) - len(sample) % 4]
    for other, order in itertools.product(("uint16", "uint32"), ("<", ">")):
        kind = np.dtype(f"{order}u{np.dtype(other).itemsize}")
        ids: Any = np.frombuffer(whole, kind)
        is_half = kind.itemsize == 2 and min(int(ids[0::2].max()), int(ids[1::2].max())) <= _MOST_UPPER
        if (other, order) == (dtype, "<") or is_half or int(ids.max()) >= vocab_size:
            continue
        hint = f'use data.dtype = "{other}"'
        if order == ">":
            hint = f"they are big-endian: write them again, as .astype('<u{kind.itemsize}').tofile does"
        raise InputError(
            f"{path} holds token {largest}, outside model.vocab_size = {vocab_size}, if read as {dtype}; "
            f"as {kind.str} all ids are below it",
            hint=hint,
        )
