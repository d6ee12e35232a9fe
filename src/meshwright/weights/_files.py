"""Read and write safetensors files, one or several in a folder.

The format (https://github.com/huggingface/safetensors): the header's length in eight bytes, the header as
JSON with format, shape and byte range of each array, then the arrays. Arrays are mapped into memory: only the
parts that are used are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, nearest_name

Numbers = NDArray[Any]

DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 * 10**9  # of one file, as `transformers` divides them
ALIGNMENT = 8  # of the beginning of the data, as the format requires
LONGEST_HEADER = 100 * 2**20


class WeightFiles:
    """The arrays of a model's folder, by name.

    Raises:
        InputError: the folder has no safetensors files, or one cannot be read or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays: dict[str, Numbers] = {}
        for file in self._files():
            self._arrays |= _mapped(file)

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.exists():
            try:
                named = json.loads(index.read_text("utf-8"))["weight_map"]
                return [self.folder / name for name in sorted(set(named.values()))]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as broken:
                raise InputError(f"{index} cannot be read: {broken}", hint="download it again") from broken
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


def _mapped(file: Path) -> dict[str, Numbers]:
    """Return the arrays of one file, mapped into memory."""
    hint = "download it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(size - 8, LONGEST_HEADER):
                raise InputError(f"{file} is no safetensors file, or is cut off", hint=hint)
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        data = np.memmap(file, np.uint8, "r")
        arrays: dict[str, Numbers] = {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                continue  # integers: positions and masks that some models save beside their weights
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if end > size:
                raise InputError(f"{file} is cut off: {name} ends beyond its {size:,} bytes", hint=hint)
            arrays[name] = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as broken:
        raise InputError(f"{file} cannot be read: {broken}", hint=hint) from broken


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
