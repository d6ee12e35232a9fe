"""Say which array of a Hugging Face file holds which of our parameters, and convert both ways.

A `Weight` is one array of theirs, or one for each layer and expert. Ours have the inputs of a product first
and the outputs last, heads apart, layers stacked in front; `torch.nn.Linear` has [outputs, inputs], GPT-2's
`Conv1D` has [inputs, outputs]. Some of theirs hold several of ours side by side.

A name that ends with "[{expert}]" is of one array with all experts of a layer, of which each is an entry.

Numbers are copied, so both directions are exact; but for Gemma's scales, to which 1 is added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshwright.config import TransformerModel, holds_layers
from meshwright.contrib.hub import FAMILIES, Family, numbers_of_parts, weight_parameters
from meshwright.contrib.state_mixers import TAPS
from meshwright.errors import InputError, nearest_name
from meshwright.trainer.models import Parameter, is_parameter
from meshwright.trainer.models.transformer import Transformer

Path = tuple[str, ...]
Numbers = NDArray[Any]  # of the formats of checkpoints: float32, float16, bfloat16 and others

STACKED = ("layer", "expert")  # dimensions of ours that are separate arrays of theirs, outermost first
SCALES, BIAS = ("scale", "query_norm", "key_norm"), "_bias"  # the last names of such parameters
BARE = (
    *("sinks", "factor", "alpha_p", "alpha_n", "input_scale", "output_scale"),
    *("log_rate", "step_bias", "skip"),
)
"""Parameters whose arrays have the name that a family gives."""
ENTRY = "[{expert}]"  # ends the name of an array with all experts of a layer
TABLES = ("embedding", "positions", "head")  # copied as they are: [rows, numbers] in both


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One array of a Hugging Face model, or one for each layer and expert.

    `name`: with "{layer}" and "{expert}" where there are several. `ours`: the parameters that it holds, side
    by side along the outputs. `num_inputs`: dimensions of ours that are inputs; 0 for a vector. `transposed`:
    theirs has the outputs first. `heads`: theirs has all of one head together, then those of the next; 0 if
    it does not. `of_taps`: theirs has a convolution's weights [channels, 1, taps].
    `alternating`: the outputs of ours take turns in theirs, one of each.
    `shaped`: the shape of theirs where ours is a vector, with -1 for its length.
    `layers`: the number of their layer for each row of ours.
    `added`: what the file's numbers lack: Gemma's scales are kept as their distance from 1.
    `constant`: a number that a file has for each layer and no model changes; `ours` only says how many
    layers there are.
    """

    name: str
    ours: tuple[Path, ...]
    num_inputs: int = 0
    transposed: bool = True
    heads: int = 0
    of_taps: bool = False
    alternating: bool = False
    layers: tuple[int, ...] = ()
    shaped: tuple[int, ...] = ()
    added: float = 0.0
    constant: float | None = None


def weights_of(model: TransformerModel, family: str) -> tuple[Weight, ...]:
    """Return the arrays of a model's file, for a `model_type` of Hugging Face.

    Raises:
        InputError: the family is not known.

    >>> from meshwright.config import load_config
    >>> [weight.name for weight in weights_of(load_config("llama3-8b").model, "llama")][:2]
    ['model.embed_tokens.weight', 'model.layers.{layer}.input_layernorm.weight']
    """
    if (found := FAMILIES.get(family)) is None:
        raise InputError(
            f"no weights of model_type {family!r} are known", hint=nearest_name(family, FAMILIES)
        )
    stacked = Transformer(model.model_copy(update={"unroll": False}))
    declared = _declared(stacked)
    chosen = dict[str, str]()
    for entry, name in found.weights.items():
        ours, _, condition = entry.partition(" if ")
        wanted = (*ours.split(".")[:-1], condition)
        if not condition or any(path in declared for path in _in_each_stretch(wanted, stacked)):
            chosen[ours] = name
    arrays = [weight for ours in chosen for weight in _weights(found, ours, chosen, declared, stacked)]
    arrays += _further(found, chosen, declared, stacked)
    like = next(weight for weight in arrays if "{layer}" in weight.name)
    constants = [
        replace(like, name=name, num_inputs=0, constant=value) for name, value in found.constants.items()
    ]
    return (*arrays, *constants)


def shapes_of(model: TransformerModel) -> dict[Path, tuple[int, ...]]:
    """Return the shapes of a model's parameters by path, with layers stacked."""
    stacked = Transformer(model.model_copy(update={"unroll": False}))
    return {path: parameter.shape for path, parameter in _declared(stacked).items()}


def _declared(model: Transformer) -> dict[Path, Parameter]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(model.parameters(), is_leaf=is_parameter)
    return {tuple(key.key for key in path): parameter for path, parameter in leaves}


def _in_each_stretch(path: Path, model: Transformer) -> list[Path]:
    """Return a path of a family's table in each stretch of layers; a path outside of layers as it is."""
    if path[0] != "layers":
        return [path]
    return [(stretch.name, *path[1:]) for stretch in model.config.stretches]


def _weights(
    family: Family,
    ours: str,
    chosen: Mapping[str, str],
    declared: Mapping[Path, Parameter],
    model: Transformer,
) -> Iterator[Weight]:
    """Yield the arrays of one entry of a family's `weights`: of each stack of layers, with their biases."""
    paths = tuple(tuple(each.split(".")) for each in weight_parameters(ours))
    named = {each for entry in chosen for each in weight_parameters(entry)}
    entry = re.sub(r"^mtp_\d+", "layers", ours)
    for stack in zip(*(_in_each_stretch(path, model) for path in paths), strict=True):
        name, last = stack[0][0], stack[0][-1]
        if stack[0] not in declared:
            continue
        of_taps = last.endswith(TAPS)
        is_product = declared[stack[0]].initial == "fan_in" and last not in TABLES and not of_taps
        num_inputs = int(is_product) + (last == "output")
        weight = Weight(
            name=chosen[ours] if _is_whole(last, chosen[ours]) else f"{chosen[ours]}.weight",
            ours=stack,
            num_inputs=num_inputs,
            transposed=not (is_product and entry in family.inputs_first),
            heads=_num_heads(stack[0], declared[stack[0]], model) if entry in family.by_head else 0,
            of_taps=of_taps,
            alternating=entry in family.alternating,
            shaped=tuple(family.shaped.get(entry, ())),
            layers=_their_layers(family, stack[0], model) if holds_layers(name) else (),
            added=1.0 if family.scales_from_one and last in SCALES else 0.0,
        )
        yield weight
        biases = tuple((*path[:-1], "bias" if last == "scale" else f"{path[-1]}{BIAS}") for path in stack)
        if biases[0] in declared and f"{ours.rpartition('.')[0]}.{biases[0][-1]}" not in named:
            name = f"{chosen[ours]}.bias"
            vectors = {"num_inputs": 0, "transposed": True, "added": 0.0, "of_taps": False}
            yield replace(weight, name=name, ours=biases, **vectors)


def _further(
    family: Family, chosen: Mapping[str, str], declared: Mapping[Path, Parameter], model: Transformer
) -> Iterator[Weight]:
    """Yield the arrays of modules that predict further tokens, as far as the family's files have such."""
    names = family.further
    known = (model.config.mtp_layers if "{" in names["block"] else 1) if names else 0
    for number in range(1, min(model.config.mtp_layers, known) + 1):
        module, beyond = f"mtp_{number}", model.config.num_layers + number - 1
        placed = {part: name.format(beyond=beyond) for part, name in names.items()}
        block = placed.pop("block")
        entries = {f"{module}.joint.matrix": placed.pop("joint")}
        entries |= {f"{module}.{part}.scale": name for part, name in placed.items()}
        entries |= {
            module + ours.removeprefix("layers"): name.replace("model.layers.{layer}", block)
            for ours, name in chosen.items()
            if ours.startswith("layers.")
        }
        for ours in entries:
            yield from _weights(family, ours, entries, declared, model)


def _their_layers(family: Family, path: Path, model: Transformer) -> tuple[int, ...]:
    """Return the number of their layer for each row of ours."""
    stretch, part, *_ = path
    layers = model.layers_with(stretch, part)
    if not family.numbered_by_part:
        return tuple(layers)
    numbers = numbers_of_parts(list(model.config.kinds))
    is_mlp = part.split("_")[0] in ("mlp", "experts", "shared")
    return tuple(numbers[layer][is_mlp] for layer in layers)


def _num_heads(path: Path, declared: Parameter, model: Transformer) -> int:
    """Return the heads by which the arrays of one entry take turns: a gated delta net's are key heads."""
    return (path[1] == "delta" and model.config.delta_key_heads) or declared.shape[-2]


def _is_whole(last: str, name: str) -> bool:
    """Return whether a family gives the whole name of an array, by the last name of our parameter."""
    return last.endswith(BIAS) or last in BARE or name.endswith(ENTRY)


def to_huggingface(
    weights: tuple[Weight, ...], parameters: Mapping[Path, Numbers]
) -> Iterator[tuple[str, Numbers]]:
    """Yield each array as a Hugging Face model holds it, with its name.

    Args:
        parameters: ours by path; those of layers stacked in front.
    """
    for weight in weights:
        arrays = [parameters[path] for path in weight.ours]
        places = places_of(weight, arrays[0].shape)
        for name, entries in groupby(places, key=lambda each: _array_and_entry(each[0])[0]):
            if weight.constant is not None:
                yield name, np.asarray(weight.constant, arrays[0].dtype)
                continue
            each = [joined_weight(weight, [array[place] for array in arrays]) for _, place in entries]
            joined = np.stack(each) if weight.name.endswith(ENTRY) else each[0]
            yield name, joined - np.asarray(weight.added, joined.dtype) if weight.added else joined


def _array_and_entry(name: str) -> tuple[str, int | None]:
    """Return the array of a name, and which of its entries is meant; None for the whole array.

    >>> _array_and_entry("mlp.experts.down_proj[3]"), _array_and_entry("lm_head.weight")
    (('mlp.experts.down_proj', 3), ('lm_head.weight', None))
    """
    array, _, entry = name.removesuffix("]").partition("[")
    return array, int(entry) if entry else None


def _reading(read: Callable[[str], Numbers]) -> Callable[[str], Numbers]:
    """Return a function that also reads an entry of an array, which it then reads alone."""

    def entry_of(name: str) -> Numbers:
        array, entry = _array_and_entry(name)
        return read(array) if entry is None else read(array)[entry]

    return entry_of


def from_huggingface(
    weights: tuple[Weight, ...],
    shapes: Mapping[Path, tuple[int, ...]],
    read: Callable[[str], Numbers],
) -> Iterator[tuple[Path, Numbers]]:
    """Yield each of our parameters with its path.

    Args:
        shapes: those of ours, by path.
        read: returns an array of theirs by its name.

    Raises:
        InputError: an array has another shape than the model needs.
    """
    entry_of = _reading(read)
    for weight in (each for each in weights if each.constant is None):
        parts: dict[Path, Numbers] = {}
        for name, place in places_of(weight, shapes[weight.ours[0]]):
            array = entry_of(name)
            array = array + np.asarray(weight.added, array.dtype) if weight.added else array
            for path, piece in _divided(weight, array, name, {p: shapes[p] for p in weight.ours}).items():
                parts.setdefault(path, np.empty(shapes[path], array.dtype))[place] = piece
        yield from parts.items()


def part_of(
    weights: tuple[Weight, ...],
    shapes: Mapping[Path, tuple[int, ...]],
    read: Callable[[str], Numbers],
    path: Path,
    index: tuple[slice, ...],
) -> Numbers:
    """Return a part of one of our parameters, and read only the layers and experts that it needs.

    Args:
        shapes, read: as for `from_huggingface`.
        index: a slice for each dimension of ours, without steps.

    Raises:
        InputError: an array has another shape than the model needs.
    """
    weight = next(each for each in weights if path in each.ours)
    named = {each: shapes[each] for each in weight.ours}
    num_stacked = sum(f"{{{field}}}" in weight.name for field in STACKED)
    stacked, inner = index[:num_stacked], index[num_stacked:]
    chosen = [range(size)[each] for size, each in zip(shapes[path], stacked, strict=False)]
    pieces: list[Numbers] = []
    entry_of = _reading(read)
    for name, place in places_of(weight, shapes[path]):
        if all(at in wanted for at, wanted in zip(place, chosen, strict=True)):
            array = entry_of(name)
            piece = _divided(weight, array, name, named)[path][inner]
            pieces.append(piece + np.asarray(weight.added, array.dtype) if weight.added else piece)
    if not num_stacked:
        return pieces[0]
    return np.stack(pieces).reshape(*(len(each) for each in chosen), *pieces[0].shape)


def places_of(weight: Weight, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each name of a weight, with the place of its array in ours: the layer, then the expert."""
    stacked = [field for field in STACKED if f"{{{field}}}" in weight.name]
    for place in product(*(range(size) for size in shape[: len(stacked)])):
        named = dict(zip(stacked, place, strict=True))
        named |= {"layer": weight.layers[named["layer"]]} if "layer" in named else {}
        yield weight.name.format(**named), place


def joined_weight(weight: Weight, arrays: list[Numbers]) -> Numbers:
    """Return theirs from ours: of one layer and expert."""
    if weight.ours[0][0] in TABLES:
        return arrays[0]
    if weight.of_taps:
        return np.concatenate([array.reshape(-1, 1, array.shape[-1]) for array in arrays])
    rows = [_rows(weight, array) for array in arrays]
    if weight.alternating:
        joined = np.stack(rows, axis=2).reshape(len(rows[0]), -1)
    elif weight.heads:
        joined = np.concatenate(rows, axis=2).reshape(len(rows[0]), -1)
    else:
        joined = _side_by_side(rows)
    if not weight.num_inputs:
        return joined[0].reshape(weight.shaped) if weight.shaped else joined[0]
    return joined.T if weight.transposed else joined


def _rows(weight: Weight, array: Numbers) -> Numbers:
    """Return one of ours as [inputs, outputs]; as [inputs, heads, numbers] if theirs are by head."""
    num_rows = math.prod(array.shape[: weight.num_inputs])
    return array.reshape(num_rows, weight.heads, -1) if weight.heads else array.reshape(num_rows, -1)


def _side_by_side(rows: list[Numbers]) -> Numbers:
    return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)


def _divided(
    weight: Weight, array: Numbers, name: str, shapes: Mapping[Path, tuple[int, ...]]
) -> dict[Path, Numbers]:
    """Split a Hugging Face array into our parameters, by path and in our shapes."""
    num_stacked = sum(f"{{{field}}}" in weight.name for field in STACKED)
    ours = {path: shape[num_stacked:] for path, shape in shapes.items()}
    wanted = joined_weight(weight, [np.broadcast_to(np.int8(0), shape) for shape in ours.values()]).shape
    if array.shape != wanted:
        raise InputError(
            f"{name} has the shape {array.shape}, and the configuration needs {wanted}",
            hint="use the config.json that lies beside the weights",
        )
    if weight.ours[0][0] in TABLES:
        return dict.fromkeys(ours, array)
    sizes = [math.prod(shape[weight.num_inputs :]) for shape in ours.values()]
    if weight.of_taps:
        channels = np.cumsum([math.prod(shape[:-1]) for shape in ours.values()])[:-1]
        parts = np.split(array, channels)
        return {path: part.reshape(ours[path]) for path, part in zip(ours, parts, strict=True)}
    rows = array.T if weight.num_inputs and weight.transposed else array
    rows = rows if weight.num_inputs else rows.reshape(1, -1)
    if weight.heads:
        ends = np.cumsum([size // weight.heads for size in sizes])[:-1]
        by_head = np.split(rows.reshape(len(rows), weight.heads, -1), ends, axis=2)
        return {path: part.reshape(shape) for part, (path, shape) in zip(by_head, ours.items(), strict=True)}
    ends = np.cumsum([math.prod(shape[weight.num_inputs :]) for shape in ours.values()])
    if weight.alternating:
        pieces = [rows[:, place :: len(ours)] for place in range(len(ours))]
    else:
        pieces = np.split(rows, ends[:-1], axis=1)
    return {path: piece.reshape(shape) for piece, (path, shape) in zip(pieces, ours.items(), strict=True)}
