"""Begin a run from the weights of a Hugging Face model: safetensors files in a folder.

Each process reads the parts that its own devices hold, from files that are mapped into memory.
Used by: `train`, through the registry, and `_exports`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.config import RunConfig, TransformerModel, holds_layers, is_table
from meshwright.contrib.hub import FAMILIES, family_of, reads_text_alone
from meshwright.contrib.lora import CODES, SCALES, matrix_of, quantised_part
from meshwright.errors import InputError
from meshwright.files import read_json, reason
from meshwright.sharding import num_chunks_of, shape_of_layers

from ._mxfp4 import unpacking
from ._other_names import by_other_names, of_text_part
from ._weight_files import WeightFiles
from ._weight_names import Weight, part_of, weights_of

Tree = Any
BASE = "base.json"
_FURTHER = re.compile(r"(?:model\.|backbone\.|language_model\.)*(?:mtp\.|layers\.(\d+)\.)")
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # what files of such modules repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The folder of a Hugging Face model from which a run began, and its `model_type`."""

    folder: str
    model_type: str

    def as_json(self) -> str:
        """Return the content of the file that `base_of` reads."""
        return json.dumps(asdict(self), indent=1)


def base_of(run: Path) -> Base | None:
    """Return the weights that a run began from; None if it began from random parameters.

    Raises:
        InputError: the file that says so cannot be read.
    """
    path = run / BASE
    if not path.is_file():
        return None
    try:
        base = Base(**read_json(path))
        if not (isinstance(base.folder, str) and isinstance(base.model_type, str)):
            raise TypeError("its values are not text")
        return base
    except (OSError, ValueError, TypeError) as broken:
        raise InputError(
            f"{path} cannot be read: {broken}", hint='write {"folder": ..., "model_type": ...} of the base'
        ) from broken


class FirstWeights:
    """The parameters with which a run begins, from the folder of a Hugging Face model.

    `base`: that folder, and the model's type. `notes`: which arrays of modules that predict further tokens
    are left out.

    Raises:
        InputError: the folder has no readable `config.json` and weights, or the run's model is no Transformer
            of a family whose weights are known.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        path = folder / "config.json"
        try:
            file = read_json(path)
            if not is_table(file) or "model_type" not in file:
                raise TypeError("it has no model_type")
            family = file["model_type"]
            if not isinstance(family, str):
                raise TypeError(f"model_type = {str(family)[:40]} is not text")
            is_part = reads_text_alone(file)
            file = {**file, **file["text_config"]} if is_part else file
            family = family_of(file) or file["model_type"]
        except (OSError, ValueError, KeyError, TypeError) as broken:
            raise InputError(
                f"{path} cannot be read: {reason(broken)}", hint="name the folder of a Hugging Face model"
            ) from broken
        if not isinstance(config.model, TransformerModel):
            raise InputError(
                f"{config.name} is a {config.model.kind} model, and {folder} holds a Transformer",
                hint=f"train {folder} itself",
            )
        if (quantised := file.get("quantization_config")) is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            if method != "mxfp4":
                raise InputError(
                    f"the weights in {folder} are quantised ({str(method)[:40]})",
                    hint="begin with weights in bf16, fp32 or MXFP4, of which many models have a folder",
                )
        self.base = Base(folder=str(folder.resolve()), model_type=family)
        self._unrolled, self._num_layers = config.model.unroll, config.model.num_layers
        self._weights: tuple[Weight, ...] = weights_of(config.model, family)
        files = WeightFiles(folder)
        self.notes = _of_further(config.model, self._weights, files.names, folder)
        self._read = unpacking(files.read, files.names)
        if is_part:
            self._read = of_text_part(self._read, files.names)
        self._read = by_other_names(self._read, files.names, FAMILIES[family].also)
        for weight in self._weights:
            if weight.constant is not None:
                self._check_constant(weight.name.format(layer=weight.layers[0]), weight.constant)

    def _check_constant(self, name: str, value: float) -> None:
        """Raise an `InputError` if a number that every model of a family has is another in this folder."""
        found = float(self._read(name))
        if not math.isclose(found, value, rel_tol=0.01):  # as rounded to bf16
            what = f"{self.base.folder}: {name} = {found:g}, and the model here has {value:g}"
            raise InputError(what, hint="begin with weights that have it")

    @property
    def documents(self) -> dict[str, str]:
        """The file of a run's folder that says what it began from, by its name."""
        return {BASE: self.base.as_json()}

    def parameters(self, abstract: Tree) -> Tree:
        """Return the parameters as `abstract` (of `jax.ShapeDtypeStruct`) lays them out.

        Raises:
            InputError: an array is missing, or has another shape than the run's model.
        """
        flat, tree = jax.tree_util.tree_flatten_with_path(abstract)
        paths = [tuple(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path) for path, _ in flat]
        shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
        for path, (_, leaf) in zip(paths, flat, strict=True):
            matrix, part = matrix_of(path)
            shape = shape_of_layers(leaf, self._num_layers, path[-1])
            if part != SCALES:  # the codes lie two in a byte
                shapes[matrix] = (*shape[:-1], 2 * shape[-1]) if part == CODES else shape
        if self._unrolled:
            self._rows = _rows(paths)
            shapes = _stacked(shapes)
        leaves = [self._array(path, leaf, shapes) for path, (_, leaf) in zip(paths, flat, strict=True)]
        return jax.tree_util.tree_unflatten(tree, leaves)

    def _array(self, path: tuple[str, ...], leaf: Any, shapes: dict[Any, tuple[int, ...]]) -> jax.Array:
        matrix, held = matrix_of(path)
        in_layer = self._unrolled and holds_layers(path[0])
        name = (path[0], *matrix[2:]) if in_layer else matrix

        def read(wanted: tuple[slice, ...]) -> np.ndarray:
            if not in_layer:
                return part_of(self._weights, shapes, self._read, name, wanted)
            layer = self._rows[path]
            return part_of(self._weights, shapes, self._read, name, (slice(layer, layer + 1), *wanted))[0]

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            wanted = tuple(index or ())
            if shape_of_layers(leaf, self._num_layers, path[-1]) != leaf.shape:
                return self._staged(leaf, wanted, read)
            if not held:
                return np.ascontiguousarray(read(wanted), leaf.dtype)
            *rest, last = wanted
            found = quantised_part(lambda numbers: read((*rest, numbers)), shapes[name][-1], held, last)
            return np.ascontiguousarray(found, leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    def _staged(self, leaf: Any, wanted: tuple[slice, ...], read: Any) -> np.ndarray:
        """Return a part of a pipeline's layers: in chunks, with zeros in the padding."""
        num_chunks, (layers, *rest) = num_chunks_of(leaf), wanted[int(num_chunks_of(leaf) > 1) :]
        per_chunk = leaf.shape[int(num_chunks > 1)]
        start, stop, _ = layers.indices(per_chunk)
        shape = [len(range(*part.indices(size))) for part, size in zip(wanted, leaf.shape, strict=True)]
        values = np.zeros(shape, leaf.dtype)
        for chunk in range(num_chunks):
            first, last = (min(chunk * per_chunk + place, self._num_layers) for place in (start, stop))
            if first < last:
                (values[chunk] if num_chunks > 1 else values)[: last - first] = read(
                    (slice(first, last), *rest)
                )
        return values


def _of_further(
    model: TransformerModel, weights: tuple[Weight, ...], names: set[str], folder: Path
) -> tuple[str, ...]:
    """Return in words which arrays of modules that predict further tokens a run leaves out.

    Raises:
        InputError: the run has such a module, and the names of its arrays are not known.
    """
    known = {path[0] for weight in weights for path in weight.ours}
    if unknown := [n for n in range(1, model.mtp_layers + 1) if f"mtp_{n}" not in known]:
        raise InputError(
            f"weights of model.mtp_layers = {model.mtp_layers} are not read from {folder}: "
            f"the names of those of module {unknown[0]} are not known",
            hint=f"use model.mtp_layers={unknown[0] - 1}, or begin with random weights",
        )
    read = {weight.name.partition("{")[0] for weight in weights if weight.ours[0][0].startswith("mtp_")}
    beyond = [
        name
        for name in sorted(names)
        if (found := _FURTHER.match(name)) and (found[1] is None or int(found[1]) >= model.num_layers)
    ]
    left = [name for name in beyond if not any(name.startswith(each) for each in read)]
    left = [name for name in left if not name.endswith(_SHARED)]
    if not left:
        return ()
    what = f"{folder}: {len(left)} arrays of modules that predict further tokens are left out"
    return (f"{what} ({left[0]}, ...)",)


def _rows(paths: list[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """Return for each array of an unrolled layer its place among the layers that have such an array."""
    rows: dict[tuple[str, ...], int] = {}
    counted = Counter[tuple[str, ...]]()
    for path in sorted((path for path in paths if holds_layers(path[0])), key=lambda path: int(path[1])):
        same = (path[0], *path[2:])
        rows[path], counted[same] = counted[same], counted[same] + 1
    return rows


def _stacked(shapes: dict[tuple[str, ...], tuple[int, ...]]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the shapes with a leading dim for stacked layers."""
    counted = Counter((path[0], *path[2:]) for path in shapes if holds_layers(path[0]))
    stacked: dict[tuple[str, ...], tuple[int, ...]] = {}
    for path, shape in shapes.items():
        if holds_layers(path[0]):
            path = (path[0], *path[2:])
            shape = (counted[path], *shape)
        stacked[path] = shape
    return stacked
