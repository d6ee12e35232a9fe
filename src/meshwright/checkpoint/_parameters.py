"""Read the parameters of a checkpoint by their paths, as exports need them.

Used by: `_huggingface` and `_peft`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ._arrays import whole_array
from ._folder import Found

HELD = 3  # arrays in host memory at once: queries, keys and values may lie side by side in theirs


class Parameters(Mapping[tuple[str, ...], np.ndarray]):
    """One part of a checkpoint's state by path, layers stacked in front, each array read when asked for.

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
        if not self._unrolled or path[0] not in ("layers", "dense_layers"):
            return whole_array(self._found, self._arrays["/".join(path)])
        number = 0
        layers: list[np.ndarray] = []
        while (name := "/".join((path[0], str(number), *path[1:]))) in self._arrays:
            layers.append(whole_array(self._found, self._arrays[name]))
            number += 1
        return np.stack(layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
