"""Write the parameters of a checkpoint as the folder of a Hugging Face model.

Used by: `cli`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..config import RunConfig, TransformerModel, huggingface_of_model
from ..errors import InputError
from ..weights import to_huggingface, weights_of, write_files
from ._arrays import PARAMETERS, StoredArray, whole_array
from ._folder import Found

HELD = 3  # arrays in host memory at once: queries, keys and values may lie side by side in theirs


def export_huggingface(found: Found, config: RunConfig, folder: Path) -> dict[str, StoredArray]:
    """Write a checkpoint's parameters and the `config.json` that describes them; return the arrays of theirs.

    Host memory: the three largest arrays, and one file of 5 GB.

    Raises:
        InputError: the model is of no known family, or the folder cannot be written.
    """
    if not isinstance(config.model, TransformerModel):
        raise InputError(
            f"{config.name} is a {config.model.kind} model: no Hugging Face family has it",
            hint="leave --format out",
        )
    tree = huggingface_of_model(config.model, config.batch.sequence_length)
    weights = weights_of(config.model, tree["model_type"])
    parameters = _Parameters(found, unrolled=config.model.unroll)
    written: dict[str, StoredArray] = {}

    def noted() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in to_huggingface(weights, parameters):
            written[name] = StoredArray(path=name, shape=array.shape, dtype=str(array.dtype))
            yield name, array

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, noted())
        (folder / "config.json").write_text(json.dumps({**tree, "dtype": "float32"}, indent=1), "utf-8")
    except OSError as refused:
        raise InputError(
            f"cannot write {folder}: {refused.strerror}", hint="name a folder that can be made and has room"
        ) from refused
    return written


class _Parameters(Mapping[tuple[str, ...], np.ndarray]):
    """The parameters of a checkpoint by path, layers stacked in front, each read when it is asked for."""

    def __init__(self, found: Found, *, unrolled: bool) -> None:
        self._found, self._unrolled = found, unrolled
        self._arrays = {
            array.path.removeprefix(PARAMETERS): array
            for array in found.manifest.arrays
            if array.path.startswith(PARAMETERS)
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
