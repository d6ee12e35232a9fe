"""Parameters as a safetensors file: https://huggingface.co/docs/safetensors, "Format"."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from ..errors import InputError
from ._manifest import StoredArray
from ._records import Found
from ._restore import whole_array
from ._write import bytes_of

PART = "parameters"
FORMATS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "uint64": "U64",
    "int32": "I32",
    "uint32": "U32",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
ALIGNMENT = 8  # of the arrays, as the format asks


def export_parameters(found: Found, path: Path) -> dict[str, StoredArray]:
    """Write a checkpoint's parameters to a safetensors file; what it holds, by name.

    Names are the parameters' paths with dots: "blocks.attention.query". Values are as trained; stacked
    layers stay one array. Host memory: the largest array. The file appears when it is whole.

    Raises:
        InputError: the file cannot be written, or has no name for a parameter's format.
    """
    arrays = {
        array.path.removeprefix(f"{PART}/").replace("/", "."): array
        for array in sorted(found.manifest.arrays, key=lambda array: array.path)
        if array.path.startswith(f"{PART}/")
    }
    for name, array in arrays.items():
        if array.dtype not in FORMATS:
            raise InputError(
                f"{name} is of {array.dtype}, which a safetensors file cannot hold",
                hint=f"train with parameters of one of {', '.join(FORMATS)}",
            )
    if not path.name:
        raise InputError(f"{str(path)!r} names no file", hint="name a file, as in parameters.safetensors")
    partial = path.with_name(f".{path.name}.partial")
    try:
        try:
            _write(partial, found, arrays)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as refused:
        raise InputError(
            f"cannot write {path}: {refused.strerror}",
            hint="name a file in a folder that exists and has room",
        ) from refused
    return arrays


def _write(path: Path, found: Found, arrays: dict[str, StoredArray]) -> None:
    with path.open("wb") as file:
        file.write(_header(found, arrays))
        for array in arrays.values():
            file.write(bytes_of(whole_array(found.folder, array)))
        file.flush()
        os.fsync(file.fileno())


def _header(found: Found, arrays: dict[str, StoredArray]) -> bytes:
    """Its length in eight bytes, then JSON: name, format, shape, and where the bytes begin and end."""
    entries: dict[str, object] = {"__metadata__": {"producer": "meshwright", "step": str(found.step)}}
    begin = 0
    for name, array in arrays.items():
        end = begin + int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
        entries[name] = {
            "dtype": FORMATS[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
