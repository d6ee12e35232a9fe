"""Read the parameters of a checkpoint by their paths, as exports need them.

Used by: `_export_model` and `_peft`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.config import holds_layers
from meshwright.contrib.lora import CODES, SCALES, dequantised_array
from meshwright.trainer.checkpoint import Found, whole_array

HELD = 3  # arrays in host memory at once: queries, keys and values may lie side by side in theirs


class Parameters(Mapping[tuple[str, ...], np.ndarray]):
    """One part of a checkpoint's state by path, layers stacked in front, each array read when asked for.

    A matrix that is held in four bits is read as a whole one, in float32.

    Args:
        part: "parameters", or "frozen".
        unrolled: whether each layer has arrays of its own in the checkpoint.
    """

    def __init__(self, found: Found, part: str, *, unrolled: bool) -> None:
        self._found, self._unrolled = found, unrolled
        self._arrays = {
            array.path.removeprefix(f"{part}/"): array
            for array in found.manifest.arrays
            if array.path.startswith(f"{part}/")
        }
        self._read = lru_cache(HELD)(self._whole)

    def __getitem__(self, path: tuple[str, ...]) -> np.ndarray:
        return self._read(path)

    def _whole(self, path: tuple[str, ...]) -> np.ndarray:
        codes, scales = ((*path[:-1], f"{path[-1]}{part}") for part in (CODES, SCALES))
        if "/".join(codes) in self._arrays or (self._in_layers(codes) and self._names(codes)):
            return dequantised_array(self._whole(codes), self._whole(scales))
        if not self._in_layers(path):
            return whole_array(self._found, self._arrays["/".join(path)])
        return np.stack([whole_array(self._found, self._arrays[name]) for name in self._names(path)])

    def _in_layers(self, path: tuple[str, ...]) -> bool:
        return self._unrolled and holds_layers(path[0])

    def _names(self, path: tuple[str, ...]) -> list[str]:
        """Return the names in the checkpoint of an array of layers that are stored separately."""
        names = {name: name.split("/") for name in self._arrays}
        of_path = [name for name, each in names.items() if (*each[:1], *each[2:]) == path]
        return sorted(of_path, key=lambda name: int(names[name][1]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
