"""Say which array of a Hugging Face file holds which of our parameters, and convert both ways.

A `Weight` is one array of theirs, or one for each layer and expert. Ours have the inputs of a product first
and the outputs last, heads apart, layers stacked in front; `torch.nn.Linear` has [outputs, inputs], GPT-2's
`Conv1D` has [inputs, outputs]. Some of theirs hold several of ours side by side.

Numbers are copied, so both directions are exact; but for Gemma's scales, to which 1 is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config import TransformerModel
from meshwright.errors import InputError, nearest_name

Path = tuple[str, ...]
Numbers = NDArray[Any]  # of the formats of checkpoints: float32, float16, bfloat16 and others

STACKED = ("layer", "expert")  # dimensions of ours that are separate arrays of theirs, outermost first
GEMMAS = ("gemma", "gemma2", "gemma3_text")
TABLES = ("embedding", "positions", "head")  # copied as they are: [rows, numbers] in both


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One array of a Hugging Face model, or one for each layer and expert.

    `name`: with "{layer}" and "{expert}" where there are several. `ours`: the parameters that it holds, side
    by side along the outputs. `num_inputs`: dimensions of ours that are inputs; 0 for a vector. `transposed`:
    theirs has the outputs first. `by_head`: theirs has all of one head together, then those of the next.
    `first`: the number of their layer that is our first.
    `added`: what the file's numbers lack: Gemma's scales are kept as their distance from 1.
    """

    name: str
    ours: tuple[Path, ...]
    num_inputs: int = 0
    transposed: bool = True
    by_head: bool = False
    first: int = 0
    added: float = 0.0


def weights_of(model: TransformerModel, family: str) -> tuple[Weight, ...]:
    """Return the arrays of a model's file, for a `model_type` of Hugging Face.

    Raises:
        InputError: the family is not known.

    >>> from meshwright.config import load_config
    >>> [weight.name for weight in weights_of(load_config("llama3-8b").model, "llama")][:2]
    ['model.embed_tokens.weight', 'model.layers.{layer}.input_layernorm.weight']
    """
    makers: dict[str, Callable[[TransformerModel], Iterator[Weight]]] = {
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
        "phi3": _fused,
        "glm": partial(_fused, fused=_FUSED_MLP),
        "glm4": _glm4,
        "glm4_moe": _glm4_moe,
        "starcoder2": _starcoder2,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        **dict.fromkeys(
            (
                *(
                    "llama",
                    "mistral",
                    "ministral",
                    "mixtral",
                    "qwen2",
                    "qwen3",
                    "qwen3_moe",
                    "olmo2",
                    "olmo3",
                ),
                *("olmoe", "seed_oss", "ernie4_5", *GEMMAS),
            ),
            _llama,
        ),
    }
    if family not in makers:
        raise InputError(f"no weights of model_type {family!r} are known", hint=nearest_name(family, makers))
    weights = tuple(makers[family](model))
    if family == "mixtral":
        names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        weights = tuple(_renamed(weight, names) for weight in weights)
    if family in GEMMAS:
        scales = ("scale", "query_norm", "key_norm")
        weights = tuple(
            replace(weight, added=1.0) if weight.ours[0][-1] in scales else weight for weight in weights
        )
    return weights


_LLAMA_NORMS = {
    "before": {"attention_norm": "input", "mlp_norm": "post_attention"},
    "after": {"attention_out_norm": "post_attention", "mlp_out_norm": "post_feedforward"},
    "both": {
        "attention_norm": "input",
        "attention_out_norm": "post_attention",
        "mlp_norm": "pre_feedforward",
        "mlp_out_norm": "post_feedforward",
    },
}


def _llama(model: TransformerModel) -> Iterator[Weight]:
    yield Weight(name="model.embed_tokens.weight", ours=(("embedding",),))
    block = "model.layers.{layer}."
    for ours, name in _LLAMA_NORMS[model.norm_place].items():
        yield Weight(name=f"{block}{name}_layernorm.weight", ours=(("layers", ours, "scale"),))
    theirs = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    for ours, name in theirs.items():
        path = ("layers", "attention", ours)
        yield Weight(
            name=f"{block}self_attn.{name}.weight", ours=(path,), num_inputs=2 if ours == "output" else 1
        )
        if model.qkv_bias and ours != "output":
            yield Weight(
                name=f"{block}self_attn.{name}.bias", ours=(("layers", "attention", f"{ours}_bias"),)
            )
    if model.qk_norm != "none":
        for ours, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            yield Weight(name=f"{block}self_attn.{name}.weight", ours=(("layers", "attention", ours),))
    group, prefix = "mlp", f"{block}mlp."
    if model.num_experts is not None:
        group, prefix = "experts", f"{block}mlp.experts.{{expert}}."
        router = ("layers", "experts", "router")
        yield Weight(name=f"{block}mlp.gate.weight", ours=(router,), num_inputs=1)
    for ours in ("gate", "up", "down") if model.mlp == "gated" else ("up", "down"):
        yield Weight(name=f"{prefix}{ours}_proj.weight", ours=(("layers", group, ours),), num_inputs=1)
    yield Weight(name="model.norm.weight", ours=(("final_norm", "scale"),))
    if not model.tied_embeddings:
        yield Weight(name="lm_head.weight", ours=(("head",),))


_FUSED_MLP = {"mlp.gate_up_proj": ("mlp", ("gate", "up"))}
_FUSED = {"self_attn.qkv_proj": ("attention", ("query", "key", "value")), **_FUSED_MLP}


def _fused(
    model: TransformerModel, fused: Mapping[str, tuple[str, tuple[str, ...]]] = _FUSED
) -> Iterator[Weight]:
    """Yield Phi-3's weights: Llama's, with query, key and value fused into one array, and gate and up too."""
    apart = {("layers", group, name) for group, names in fused.values() for name in names}
    yield from (weight for weight in _llama(model) if weight.ours[0] not in apart)
    for name, (group, names) in fused.items():
        paths = tuple(("layers", group, each) for each in names)
        yield Weight(name=f"model.layers.{{layer}}.{name}.weight", ours=paths, num_inputs=1)


def _glm4(model: TransformerModel) -> Iterator[Weight]:
    """Yield GLM-4's weights: Llama's, with gate and up fused and other names for the four norms."""
    names = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    for weight in _fused(model, _FUSED_MLP):
        last = weight.name.removesuffix(".weight").rpartition(".")[2]
        yield replace(weight, name=weight.name.replace(last, names.get(last, last)))


def _starcoder2(model: TransformerModel) -> Iterator[Weight]:
    """Yield Llama's with biases, LayerNorms and an MLP without a gate."""
    names = {"up": "c_fc", "down": "c_proj"}
    for weight in _llama(model):
        group, ours = weight.ours[0][-2:] if len(weight.ours[0]) > 1 else ("", "")
        if group == "mlp" and ours in names:
            weight = replace(weight, name=weight.name.replace(f"{ours}_proj", names[ours]))
        yield weight
        if ours == "scale" or group in ("attention", "mlp"):
            path = (*weight.ours[0][:-1], "bias" if ours == "scale" else f"{ours}_bias")
            yield Weight(name=weight.name.replace(".weight", ".bias"), ours=(path,))


def _deepseek(model: TransformerModel) -> Iterator[Weight]:
    """Yield Llama's tables and norms, latent attention, and dense layers before those with experts."""
    dense = model.num_dense_layers
    for weight in _llama(model):
        path = weight.ours[0]
        if path[0] != "layers":
            yield weight
        elif path[1] not in ("attention", "mlp", "experts"):
            yield from _in_both(weight, dense)
    block = "model.layers.{layer}.self_attn."
    latent = [(f"{block}kv_a_proj_with_mqa", ("key_down", "key_rotary"), 1)]
    latent += [(f"{block}kv_a_layernorm", ("key_down_norm",), 0), (f"{block}o_proj", ("output",), 2)]
    if model.query_rank is None:
        latent += [(f"{block}q_proj", ("query",), 1)]
    else:
        latent += [(f"{block}q_a_proj", ("query_down",), 1), (f"{block}q_b_proj", ("query",), 1)]
        latent += [(f"{block}q_a_layernorm", ("query_down_norm",), 0)]
    for name, ours, num_inputs in latent:
        paths = tuple(("layers", "attention", each) for each in ours)
        yield from _in_both(Weight(name=f"{name}.weight", ours=paths, num_inputs=num_inputs), dense)
    paths = (("layers", "attention", "key"), ("layers", "attention", "value"))
    both = Weight(name=f"{block}kv_b_proj.weight", ours=paths, num_inputs=1, by_head=True)
    yield from _in_both(both, dense)
    yield from _deepseek_mlps(model, dense)


def _glm4_moe(model: TransformerModel) -> Iterator[Weight]:
    """Yield Llama's attention, with DeepSeek's dense layers before those with experts."""
    for weight in _llama(model):
        path = weight.ours[0]
        if path[0] != "layers":
            yield weight
        elif path[1] not in ("mlp", "experts"):
            yield from _in_both(weight, model.num_dense_layers)
    yield from _deepseek_mlps(model, model.num_dense_layers)


def _deepseek_mlps(model: TransformerModel, dense: int) -> Iterator[Weight]:
    block = "model.layers.{layer}.mlp."
    for name in ("gate", "up", "down"):
        path = ("layers", "mlp", name)
        if dense:
            ours = (("dense_layers", *path[1:]),)
            yield Weight(name=f"{block}{name}_proj.weight", ours=ours, num_inputs=1)
        if model.num_shared_experts:
            shared = f"{block}shared_experts.{name}_proj.weight"
            yield Weight(name=shared, ours=(path,), num_inputs=1, first=dense)
        routed = f"{block}experts.{{expert}}.{name}_proj.weight"
        yield Weight(name=routed, ours=(("layers", "experts", name),), num_inputs=1, first=dense)
    router = (("layers", "experts", "router"),)
    yield Weight(name=f"{block}gate.weight", ours=router, num_inputs=1, first=dense)
    if model.router_bias:
        bias = (("layers", "experts", "router_bias"),)
        yield Weight(name=f"{block}gate.e_score_correction_bias", ours=bias, first=dense)


def _in_both(weight: Weight, dense: int) -> Iterator[Weight]:
    """Yield a weight that all layers have: for those with experts, and for those before them."""
    yield replace(weight, first=dense)
    if dense:
        yield replace(weight, ours=tuple(("dense_layers", *path[1:]) for path in weight.ours))


def _gpt_neox(model: TransformerModel) -> Iterator[Weight]:
    yield Weight(name="gpt_neox.embed_in.weight", ours=(("embedding",),))
    block = "gpt_neox.layers.{layer}."
    products = {
        "attention.query_key_value": ("attention", ("query", "key", "value"), 1),
        "attention.dense": ("attention", ("output",), 2),
        "mlp.dense_h_to_4h": ("mlp", ("up",), 1),
        "mlp.dense_4h_to_h": ("mlp", ("down",), 1),
    }
    for theirs, (group, names, num_inputs) in products.items():
        paths = tuple(("layers", group, name) for name in names)
        biases = tuple(("layers", group, f"{name}_bias") for name in names)
        by_head = len(names) > 1
        yield Weight(name=f"{block}{theirs}.weight", ours=paths, num_inputs=num_inputs, by_head=by_head)
        yield Weight(name=f"{block}{theirs}.bias", ours=biases, by_head=by_head)
    norms = {
        f"{block}input_layernorm": ("layers", "attention_norm"),
        f"{block}post_attention_layernorm": ("layers", "mlp_norm"),
        "gpt_neox.final_layer_norm": ("final_norm",),
    }
    for theirs, ours in norms.items():
        yield Weight(name=f"{theirs}.weight", ours=((*ours, "scale"),))
        yield Weight(name=f"{theirs}.bias", ours=((*ours, "bias"),))
    if not model.tied_embeddings:
        yield Weight(name="embed_out.weight", ours=(("head",),))


def _renamed(weight: Weight, names: Mapping[str, str]) -> Weight:
    """Return a weight of Mixtral, which has names of its own for the experts."""
    name = weight.name.replace(".mlp.", ".block_sparse_moe.")
    for ours, theirs in names.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return replace(weight, name=name)


def _gpt2(model: TransformerModel) -> Iterator[Weight]:
    yield Weight(name="transformer.wte.weight", ours=(("embedding",),))
    yield Weight(name="transformer.wpe.weight", ours=(("positions",),))
    block = "transformer.h.{layer}."
    names = ("query", "key", "value")
    products = {
        "attn.c_attn": ("attention", names, 1),
        "attn.c_proj": ("attention", ("output",), 2),
        "mlp.c_fc": ("mlp", ("up",), 1),
        "mlp.c_proj": ("mlp", ("down",), 1),
    }
    for theirs, (group, ours, num_inputs) in products.items():
        paths = tuple(("layers", group, name) for name in ours)
        yield Weight(name=f"{block}{theirs}.weight", ours=paths, num_inputs=num_inputs, transposed=False)
        biases = tuple(("layers", group, f"{name}_bias") for name in ours)
        yield Weight(name=f"{block}{theirs}.bias", ours=biases)
    for theirs, ours in (
        (f"{block}ln_1", ("layers", "attention_norm")),
        (f"{block}ln_2", ("layers", "mlp_norm")),
    ):
        yield Weight(name=f"{theirs}.weight", ours=((*ours, "scale"),))
        yield Weight(name=f"{theirs}.bias", ours=((*ours, "bias"),))
    yield Weight(name="transformer.ln_f.weight", ours=(("final_norm", "scale"),))
    yield Weight(name="transformer.ln_f.bias", ours=(("final_norm", "bias"),))
    if not model.tied_embeddings:
        yield Weight(name="lm_head.weight", ours=(("head",),))


def to_huggingface(
    weights: tuple[Weight, ...], parameters: Mapping[Path, Numbers]
) -> Iterator[tuple[str, Numbers]]:
    """Yield each array as a Hugging Face model holds it, with its name.

    Args:
        parameters: ours by path; those of layers stacked in front.
    """
    for weight in weights:
        arrays = [parameters[path] for path in weight.ours]
        for name, place in places_of(weight, arrays[0].shape):
            joined = joined_weight(weight, [array[place] for array in arrays])
            yield name, joined - np.asarray(weight.added, joined.dtype) if weight.added else joined


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
    for weight in weights:
        parts: dict[Path, Numbers] = {}
        for name, place in places_of(weight, shapes[weight.ours[0]]):
            array = read(name)
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
    for name, place in places_of(weight, shapes[path]):
        if all(at in wanted for at, wanted in zip(place, chosen, strict=True)):
            array = read(name)
            piece = _divided(weight, array, name, named)[path][inner]
            pieces.append(piece + np.asarray(weight.added, array.dtype) if weight.added else piece)
    if not num_stacked:
        return pieces[0]
    return np.stack(pieces).reshape(*(len(each) for each in chosen), *pieces[0].shape)


def places_of(weight: Weight, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each name of a weight, with the place of its array in ours: the layer, then the expert."""
    stacked = [field for field in STACKED if f"{{{field}}}" in weight.name]
    for place in product(*(range(size) for size in shape[: len(stacked)])):
        numbers = {"layer": weight.first, "expert": 0}
        named = {field: at + numbers[field] for field, at in zip(stacked, place, strict=True)}
        yield weight.name.format(**named), place


def joined_weight(weight: Weight, arrays: list[Numbers]) -> Numbers:
    """Return theirs from ours: of one layer and expert."""
    if weight.ours[0][0] in TABLES:
        return arrays[0]
    rows = [_rows(weight, array) for array in arrays]
    joined = np.concatenate(rows, axis=2).reshape(len(rows[0]), -1) if weight.by_head else _side_by_side(rows)
    if not weight.num_inputs:
        return joined[0]
    return joined.T if weight.transposed else joined


def _rows(weight: Weight, array: Numbers) -> Numbers:
    """Return one of ours as [inputs, outputs]; as [inputs, heads, numbers] if theirs are by head."""
    num_rows = math.prod(array.shape[: weight.num_inputs])
    return array.reshape(num_rows, *array.shape[-2:]) if weight.by_head else array.reshape(num_rows, -1)


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
    rows = array.T if weight.num_inputs and weight.transposed else array
    rows = rows if weight.num_inputs else rows[None]
    if weight.by_head:
        heads = next(iter(ours.values()))[-2]
        by_head = np.split(
            rows.reshape(len(rows), heads, -1), np.cumsum([shape[-1] for shape in ours.values()])[:-1], axis=2
        )
        return {path: part.reshape(shape) for part, (path, shape) in zip(by_head, ours.items(), strict=True)}
    ends = np.cumsum([math.prod(shape[weight.num_inputs :]) for shape in ours.values()])
    pieces = np.split(rows, ends[:-1], axis=1)
    return {path: piece.reshape(shape) for piece, (path, shape) in zip(pieces, ours.items(), strict=True)}
