"""Read and write safetensors files, one or several in a folder.

The format (https://github.com/huggingface/safetensors): the header's length in eight bytes, the header as
JSON with format, shape and byte range of each array, then the arrays. Arrays are mapped into memory: only the
parts that are used are read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, nearest_name
from meshwright.files import open_file, parsed_json, read_json, reason, within

from ._mxfp4 import BLOCKS, SCALES

Numbers = NDArray[Any]

DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
BYTES = "U8"  # of numbers in MXFP4; other integers are positions and masks that some models save beside
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 * 10**9  # of one file, as `transformers` divides them
ALIGNMENT = 8  # of the beginning of the data, as the format requires
LONGEST_HEADER = 100 * 2**20
_AGAIN = "download it again"


class WeightFiles:
    """The arrays of a model's folder, by name.

    Raises:
        InputError: the folder has no safetensors files, or one cannot be read or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays: dict[str, Numbers] = {}
        index = folder / INDEX
        if index.exists():
            placed = _placed(index)
            arrays = {file: _mapped(file) for file in sorted(set(placed.values()))}
            for name, file in placed.items():
                if name in arrays[file]:
                    self._arrays[name] = arrays[file][name]
            return
        for file in self._files():
            found = _mapped(file)
            if twice := sorted(self._arrays.keys() & found.keys()):
                raise InputError(
                    f"{folder}: {file.name} has {_shown(twice[0])}, which another file there has too",
                    hint=f"keep the files of one model there, or add {INDEX}, which says whose array counts",
                )
            self._arrays |= found

    def _files(self) -> list[Path]:
        if (self.folder / SINGLE).exists():
            return [self.folder / SINGLE]
        if found := sorted(self.folder.glob("*.safetensors")):
            return found
        raise InputError(
            f"no safetensors file is in {self.folder}",
            hint=f"name a folder with {SINGLE}, or with {INDEX} and the files that it names",
        )

    def read(self, name: str) -> Numbers:
        """Return an array, mapped into memory.

        Raises:
            InputError: no file has an array of that name.
        """
        if name not in self._arrays:
            raise InputError(
                f"{self.folder} has no array {name!r}",
                hint=f"{nearest_name(name, list(self._arrays)[:1000])}; are these the weights of this model?",
            )
        return self._arrays[name]

    @property
    def names(self) -> set[str]:
        """Names of all arrays."""
        return set(self._arrays)


def _placed(index: Path) -> dict[str, Path]:
    """Return the file of each array, as an index says."""
    try:
        tree = read_json(index, LONGEST_HEADER)
        named = tree.get("weight_map") if isinstance(tree, dict) else None
        if not isinstance(named, dict):
            raise ValueError("it has no table weight_map")
        return {name: within(index.parent, file) for name, file in named.items()}
    except (OSError, ValueError) as broken:
        raise InputError(f"{index} cannot be read: {reason(broken)}", hint=_AGAIN) from broken


def _mapped(file: Path) -> dict[str, Numbers]:
    """Return the arrays of one file, mapped into memory.

    The format leaves no byte of the data out, and has none twice: a header that says otherwise was not
    written by its library, and might show one array's numbers as another's.
    """
    try:
        with open_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(size - 8, LONGEST_HEADER):
                raise InputError(f"{file} is no safetensors file, or is cut off", hint=_AGAIN)
            header = parsed_json(opened.read(length))
            data = np.memmap(opened, np.uint8, "r")
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        header.pop("__metadata__", None)
        entries = sorted(
            (_entry_of(name, entry) for name, entry in header.items()), key=lambda each: each.begin
        )
        _check_ranges(entries, size - 8 - length)
        arrays: dict[str, Numbers] = {}
        for each in entries:
            is_packed = each.dtype == BYTES and each.name.endswith((BLOCKS, SCALES))
            if each.dtype in DTYPES or is_packed:
                numbers = data[8 + length + each.begin : 8 + length + each.end]
                arrays[each.name] = numbers.view(DTYPES.get(each.dtype, np.uint8)).reshape(each.shape)
        return arrays
    except (OSError, ValueError) as broken:
        raise InputError(f"{file} cannot be read: {reason(broken)}", hint=_AGAIN) from broken


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One array of a header, in bytes `begin` to `end` of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _entry_of(name: str, entry: Any) -> _Entry:
    """Return an entry of a header after a check of its kinds and size.

    Raises:
        ValueError: they are not as the format has them.
    """
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        what = f"{_shown(name)} has no dtype, shape and data_offsets of whole numbers: {_shown(entry)}"
        raise ValueError(what)
    made = _Entry(name=name, dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])
    if dtype in DTYPES or dtype == BYTES:
        wanted = math.prod(made.shape) * np.dtype(DTYPES.get(dtype, np.uint8)).itemsize
        if made.end - made.begin != wanted:
            what = f"{dtype}{list(made.shape)} has {wanted:,} bytes, and its range {made.end - made.begin:,}"
            raise ValueError(f"{_shown(name)}: {what}")
    return made


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _check_ranges(entries: Sequence[_Entry], num_bytes: int) -> None:
    """Check that the entries' ranges follow each other from the data's first byte to its last."""
    before = 0
    for each in entries:
        if each.begin != before or each.end < each.begin:
            raise ValueError(
                f"{_shown(each.name)} is at bytes {each.begin:,} to {each.end:,} of the data, "
                f"and the array before it ends at {before:,}"
            )
        if each.end > num_bytes:
            raise ValueError(
                f"it is cut off: {_shown(each.name)} ends beyond its {num_bytes:,} bytes of data"
            )
        before = each.end
    if before != num_bytes:
        raise ValueError(f"its arrays end at byte {before:,} of {num_bytes:,} bytes of data")


def _shown(value: object) -> str:
    return repr(value)[:100]


def write_files(
    folder: Path, arrays: Iterable[tuple[str, Numbers]], shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write arrays into a folder, in files of at most `shard_bytes` where one array is not larger.

    Several files get an index. Host memory: the arrays of one file. Return the names of all arrays.

    Raises:
        InputError: an array has a format that the files cannot hold.
        OSError: a file cannot be written.
    """
    shards: list[tuple[Path, list[str]]] = []
    held: list[tuple[str, Numbers]] = []
    total = held_bytes = 0

    def write() -> None:
        path = folder / f".part-{len(shards)}"
        write_file(path, held)
        shards.append((path, [name for name, _ in held]))
        held.clear()

    for name, array in arrays:
        if array.dtype not in NAMES:
            raise InputError(
                f"{name} is of {array.dtype}, which a safetensors file of weights cannot hold",
                hint=f"use one of {', '.join(str(dtype) for dtype in NAMES)}",
            )
        if held and held_bytes + array.nbytes > shard_bytes:
            write()
            held_bytes = 0
        held.append((name, array))
        held_bytes += array.nbytes
        total += array.nbytes
    write()
    if len(shards) == 1:
        shards[0][0].replace(folder / SINGLE)
        return shards[0][1]
    where: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.replace(folder / file)
        where |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
    (folder / INDEX).write_text(text, "utf-8")
    return list(where)


def write_file(path: Path, arrays: list[tuple[str, Numbers]]) -> None:
    """Write arrays into one file, and have the system put it on the disk.

    Raises:
        OSError: the file cannot be written.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # `transformers` reads no other
    begin = 0
    for name, array in arrays:
        end = begin + array.nbytes
        entries[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in arrays:
            flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            file.write(memoryview(flat))
        file.flush()
        os.fsync(file.fileno())
