"""Write the adapters of a checkpoint as PEFT reads them, and merge them into the parameters.

PEFT holds an adapter of a `Linear` as `lora_A.weight` [rank, inputs] and `lora_B.weight` [outputs, rank], and
adds B A x alpha / rank (https://github.com/huggingface/peft, `peft/tuners/lora/layer.py`). Where a family has
several of our products in one array of its own (GPT-2, GPT-NeoX, Phi-3), their adapters become one: the A
matrices below each other, and each B in the rows of its own outputs. Its rank and alpha are as many times
ours, which leaves the scale as it is.

Used by: `_exports`, and `_export_model` to merge.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import LoraConfig, RunConfig, TransformerModel
from meshwright.contrib.hub import FAMILIES, huggingface_of_model
from meshwright.contrib.lora import adapted_products
from meshwright.errors import InputError
from meshwright.trainer.checkpoint import Found, StoredArray

from ._checkpoint_parameters import Parameters
from ._weight_files import write_file
from ._weight_names import Weight, joined_weight, places_of, shapes_of, weights_of

SUFFIX = "_adapter"
"""Ends the name of an adapter among a block's parameters."""
PREFIX, ENDING = "base_model.model.", ".weight"
UNLOADED = {"nemotron_h": "out_proj"}
"""The product of a family whose adapter PEFT refuses, since a fused kernel would pass over it."""
CONV1D = "gpt2"  # the family whose products are stored with the inputs first
Key = tuple[str, ...]
_Module = tuple[Weight, list[Key]]  # a product of theirs, and those of ours in it that have adapters


def export_peft(
    found: Found, config: RunConfig, folder: Path, *, base: str | None = None, family: str | None = None
) -> dict[str, StoredArray]:
    """Write `adapter_model.safetensors` and `adapter_config.json`; return the arrays of the first.

    Args:
        base: the folder of the model that the run began from, which PEFT loads by itself if it is known.
        family: the `model_type` of that model; by default the first that has these sizes.

    Raises:
        InputError: the run has no adapters, its model is of no known family, PEFT cannot load them, or the
            folder cannot be written.
    """
    model, lora = config.model, config.lora
    if not isinstance(model, TransformerModel) or lora.rank is None:
        raise InputError(
            f"{config.name} was trained without adapters", hint="use --format huggingface for its parameters"
        )
    family = family or str(huggingface_of_model(model, config.batch.sequence_length)["model_type"])
    weights, inside = weights_of(model, family), FAMILIES[family].modules
    modules = list(_modules(weights, model, lora))
    parameters = Parameters(found, "parameters", unrolled=model.unroll)
    if UNLOADED.get(family) in {_names(weights)[weight.name] for weight, _ in modules}:
        raise InputError(
            f"PEFT loads no adapter of {UNLOADED[family]} in a {family} model",
            hint="use --format huggingface, which adds the adapters to the parameters",
        )
    declared = shapes_of(model)
    arrays = [array for module in modules for array in _arrays(module, parameters, declared, inside)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "adapter_model.safetensors", arrays)
        tree = _adapter_config(modules, _names(weights), lora, is_conv=family == CONV1D)
        tree["base_model_name_or_path"] = base
        (folder / "adapter_config.json").write_text(json.dumps(tree, indent=1), "utf-8")
    except OSError as refused:
        raise InputError(
            f"cannot write {folder}: {refused.strerror}", hint="name a folder that can be made and has room"
        ) from refused
    return {name: StoredArray(path=name, shape=a.shape, dtype=str(a.dtype)) for name, a in arrays}


class Merged(Mapping[Key, np.ndarray]):
    """The parameters of a run with adapters, each with its adapter's product added, in float32."""

    def __init__(self, found: Found, config: RunConfig) -> None:
        assert isinstance(config.model, TransformerModel), "only transformers have adapters"
        self._base = Parameters(found, "frozen", unrolled=config.model.unroll)
        self._adapters = Parameters(found, "parameters", unrolled=config.model.unroll)
        self._scale = np.float32(config.lora.scale)
        self._adapted = _adapted(config.model, config.lora)

    def __getitem__(self, path: Key) -> np.ndarray:
        weight = np.asarray(self._base[path], np.float32)
        if path not in self._adapted:
            return weight
        name = (*path[:-1], f"{path[-1]}{SUFFIX}")
        first, second = (np.asarray(self._adapters[*name, side], np.float32) for side in "ab")
        layers = first.shape[0]
        # Heads lie apart: A ends and B begins with the rank, after the layers.
        product = first.reshape(layers, -1, first.shape[-1]) @ second.reshape(layers, second.shape[1], -1)
        return weight + self._scale * product.reshape(weight.shape)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _adapted(model: TransformerModel, lora: LoraConfig) -> set[Key]:
    return {(stretch.name, *place) for stretch in model.stretches for place in adapted_products(lora, model)}


def _modules(weights: tuple[Weight, ...], model: TransformerModel, lora: LoraConfig) -> Iterator[_Module]:
    """Yield the products of a family that have adapters, in the order of the family's arrays."""
    adapted = _adapted(model, lora)
    for weight in weights:
        chosen = [path for path in weight.ours if path in adapted]
        if weight.num_inputs and chosen:
            yield weight, chosen


def _arrays(
    module: _Module,
    parameters: Mapping[Key, np.ndarray],
    declared: Mapping[Key, tuple[int, ...]],
    inside: Mapping[str, str],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the matrices A and B of one product, as PEFT holds them, for each layer.

    Args:
        module: the product.
        parameters: the run's, by path.
        declared: the shapes of the base's parameters.
        inside: parts of modules' names, by those of the arrays in files.
    """
    weight, chosen = module
    both = {path: [parameters[*path[:-1], f"{path[-1]}{SUFFIX}", side] for side in "ab"] for path in chosen}
    rank = next(iter(both.values()))[1].shape[1]
    shapes = {path: declared[path][1 + weight.num_inputs :] for path in weight.ours}
    for name, (layer, *_) in places_of(weight, (len(weight.layers),)):
        firsts = [first[layer].reshape(-1, rank).T for first, _ in both.values()]
        seconds = []
        for path in weight.ours:  # zeros but in the rows of its own adapter
            rows = np.zeros((rank * len(chosen), *shapes[path]), np.float32)
            if path in chosen:
                start = rank * chosen.index(path)
                rows[start : start + rank] = both[path][1][layer]
            seconds.append(rows)
        second = joined_weight(replace(weight, num_inputs=1, transposed=True), seconds)
        stem = PREFIX + _of_module(name, inside)
        yield f"{stem}.lora_A.weight", np.ascontiguousarray(np.concatenate(firsts))
        yield f"{stem}.lora_B.weight", np.ascontiguousarray(second)


def _of_module(name: str, inside: Mapping[str, str]) -> str:
    """Return the name of the module whose weight an array of a file is."""
    for part, other in inside.items():
        name = name.replace(part, other)
    return name.removesuffix(ENDING)


def _names(weights: tuple[Weight, ...]) -> dict[str, str]:
    """Return the ends of names by which PEFT finds products: "q_proj"; "attn.c_proj" where there are two."""
    paths = {w.name: w.name.removesuffix(ENDING).split(".") for w in weights if w.num_inputs}
    last = Counter(path[-1] for path in paths.values())
    return {name: ".".join(path[-1 if last[path[-1]] == 1 else -2 :]) for name, path in paths.items()}


def _adapter_config(
    modules: list[_Module], names_of: Mapping[str, str], lora: LoraConfig, *, is_conv: bool
) -> dict[str, Any]:
    """Return what PEFT's `LoraConfig` reads; ranks that differ from the run's stand in the patterns."""
    assert lora.rank is not None, "the run has adapters"
    names = [names_of[weight.name] for weight, _ in modules]
    several = {name: len(ours) for name, (_, ours) in zip(names, modules, strict=True) if len(ours) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": names,
        "rank_pattern": {name: count * lora.rank for name, count in several.items()},
        "alpha_pattern": {name: count * lora.alpha for name, count in several.items()},
        "fan_in_fan_out": is_conv,
        "inference_mode": True,
    }
