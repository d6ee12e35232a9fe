"""Name the products that have adapters, count their parameters, and refuse what does not go with them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from meshwright.config import (
    GLOBAL_ATTENTION,
    NF4_BLOCK,
    Layout,
    LoraConfig,
    Problem,
    RunConfig,
    TransformerModel,
    near_divisors,
    or_list,
)
from meshwright.errors import nearest_name

_OF_DELTA: dict[str, tuple[str, ...]] = {
    **{"in_proj_qkv": ("query", "key", "value"), "in_proj_z": ("output_gate", "output_gate_down")},
    **{"in_proj_b": ("beta",), "in_proj_a": ("decay", "decay_down")},
}
_OF_DELTA["in_proj_qkvz"] = _OF_DELTA["in_proj_qkv"] + _OF_DELTA["in_proj_z"]
_OF_DELTA["in_proj_ba"] = _OF_DELTA["in_proj_b"] + _OF_DELTA["in_proj_a"]
_INTO_DELTA = tuple(
    ("delta", name) for target in ("in_proj_qkvz", "in_proj_ba") for name in _OF_DELTA[target]
)
_INTO_MAMBA = tuple(("mamba", name) for name in ("output_gate", "value", "key", "query", "step"))
_OF_MLPS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
TARGETS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "q_proj": (("attention", "query"), ("attention", "output_gate")),
    "k_proj": (("attention", "key"),),
    "v_proj": (("attention", "value"),),
    "o_proj": (("attention", "output"),),
    **{target: (("mlp", name),) for target, name in _OF_MLPS.items()},
    "in_proj": (*_INTO_DELTA, *_INTO_MAMBA),
    "out_proj": (("delta", "output"), ("mamba", "output")),
    **{target: tuple(("delta", name) for name in names) for target, names in _OF_DELTA.items()},
}
"""Maps PEFT's name of a product to ours: the group of a block, and the name within it.

Where a model gates attention, `q_proj` makes the gate too. `in_proj` and `out_proj` are those of gated delta
nets and Mamba-2; the longer names are of Qwen3-Next's and Qwen3.5's parts.
"""
ALL = "all-linear"
LEAST_NF4_BLOCK = 16
"""The fewest: with smaller ones the scales would take more than a third of what is held."""


def target_problems(targets: tuple[str, ...]) -> list[Problem]:
    """Return what is wrong with the names of products; paths start at the section."""
    if not targets:
        return [("targets", "is empty, so that nothing would be trained", 'use ["q_proj", "v_proj"]')]
    known = (*TARGETS, ALL)
    return [
        ("targets", f"holds {name!r}, which is no product of a block", nearest_name(name, known))
        for name in targets
        if name not in known
    ]


def adapted_products(lora: LoraConfig, model: TransformerModel) -> tuple[tuple[str, str], ...]:
    """Return the group and name of each product of a model that has an adapter."""
    named = TARGETS if ALL in lora.targets else [name for name in TARGETS if name in lora.targets]
    wanted = [place for name in named for place in TARGETS[name]]
    wanted += [(GLOBAL_ATTENTION, name) for group, name in wanted if group == "attention"]
    sizes = adapter_sizes(model)
    return tuple(place for place in dict.fromkeys(wanted) if place in sizes)


def num_adapter_parameters(lora: LoraConfig, model: TransformerModel) -> int:
    """Return the number of parameters of all adapters: L x rank x (inputs + outputs) of each product."""
    layers, sizes = _layers_of(model), adapter_sizes(model)
    products = adapted_products(lora, model)
    return (lora.rank or 0) * sum(layers[group] * sum(sizes[group, name]) for group, name in products)


def _layers_of(model: TransformerModel) -> dict[str, int]:
    """Return the number of layers that have each group of products."""
    counts = [count for _, count in model.attentions]
    found = dict(zip(("attention", GLOBAL_ATTENTION), counts, strict=False))
    return {
        **found,
        "mlp": model.count(mlp="mlp"),
        **{mixer: model.count(mixer=mixer) for mixer in ("delta", "mamba")},
    }


def adapter_sizes(model: TransformerModel) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the numbers of inputs and outputs of each product of a model's blocks, by group and name.

    Those of experts, and of latents, are left out.
    """
    width, layers = model.embed_dim, _layers_of(model)
    products: dict[str, dict[str, tuple[int, int]]] = {"mlp": _between(width, model.plain_mlp_dim, model)}
    for group, (attention, _) in zip(("attention", GLOBAL_ATTENTION), model.attentions, strict=False):
        products[group] = _of_attention(attention)
    products |= {"delta": model.delta_products, "mamba": model.mamba_products}
    return {
        (group, name): size
        for group, named in products.items()
        if layers[group]
        for name, size in named.items()
    }


def _between(width: int, hidden: int, model: TransformerModel) -> dict[str, tuple[int, int]]:
    sizes = {"up": (width, hidden), "down": (hidden, width)}
    return {"gate": (width, hidden), **sizes} if model.mlp == "gated" else sizes


def _of_attention(model: TransformerModel) -> dict[str, tuple[int, int]]:
    width, heads = model.embed_dim, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    sizes = {"query": (width, heads), "key": (width, keys), "output": (heads, width)}
    sizes |= {} if model.global_key_is_value else {"value": (width, keys)}
    return sizes | ({"output_gate": (width, heads)} if model.attention_gate else {})


def lora_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what a run's adapters cannot be combined with; paths start at the run."""
    lora, model = config.lora, config.model
    if not isinstance(model, TransformerModel):
        what = f"= {lora.rank}, but a {model.kind} model has no products with adapters"
        yield "lora.rank", what, "leave lora out"
        return
    yield from _target_problems(lora, model)
    if model.mtp_layers:
        what = f"= {model.mtp_layers}, and adapters of modules that predict further tokens are not run"
        yield "model.mtp_layers", what, "leave mtp_layers out"
    if model.router_bias_rate:
        what = f"= {model.router_bias_rate} has nothing to move: lora freezes the router's bias"
        yield "model.router_bias_rate", what, "leave router_bias_rate out"
    if model.latent_rank is not None or model.num_dense_layers:
        what = f"= {lora.rank}, but adapters beside latent attention and dense first layers are not run"
        yield "lora.rank", what, "leave lora out, or fine-tune a model without them"
    if lora.base == "nf4":
        yield from _nf4_problems(model)
    if config.zero1:
        what = "= true divides parameters and moments that are trained over data; with lora those are few"
        yield "zero1", what, "use zero1 = false; fsdp divides the frozen parameters"


def _target_problems(lora: LoraConfig, model: TransformerModel) -> Iterator[Problem]:
    """Yield the products that have no adapters, and those that no layer has."""
    if model.num_experts is not None and {*_OF_MLPS, ALL} & set(lora.targets):
        what = "has products of the MLP, and experts have no adapters"
        mixers = ["q_proj", "k_proj", "v_proj", "o_proj"] * (model.num_attention_layers > 0)
        mixers += ["in_proj", "out_proj"] * (model.num_attention_layers < model.num_layers)
        yield "lora.targets", what, f"use {json.dumps(mixers)}"
        return
    sizes = adapter_sizes(model)
    for name in lora.targets:
        if name in TARGETS and not sizes.keys() & TARGETS[name]:
            known = " or ".join(each for each in TARGETS if sizes.keys() & TARGETS[each])
            yield "lora.targets", f"has {name!r}, which no layer of this model has", f"use {known}"


def _nf4_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield what cannot be held in four bits."""
    if model.num_experts is not None:
        yield (
            "lora.base",
            '= "nf4", but matrices of experts are not held in four bits',
            'use base = "compute"',
        )
    sizes = {"head_dim": model.head_dim, "embed_dim": model.embed_dim, "mlp_dim": model.mlp_dim}
    names = ("global_head_dim", "delta_key_dim", "delta_value_dim", "delta_heads", "delta_rank")
    names += ("mamba_head_dim", "mamba_state_dim", "mamba_heads")
    sizes |= {name: getattr(model, name) for name in names if getattr(model, name) is not None}
    for name, size in sizes.items():
        if math.gcd(size, NF4_BLOCK) < LEAST_NF4_BLOCK:
            what = f'= "nf4" gives a scale to every {LEAST_NF4_BLOCK} to {NF4_BLOCK} numbers side by side, '
            yield "lora.base", f"{what}which do not divide {name} = {size}", 'use base = "compute"'


def block_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield the dimensions whose blocks of frozen numbers in four bits do not divide over their axis."""
    model = config.model
    assert isinstance(model, TransformerModel), "the configuration is checked"
    for axis, name, size in (("fsdp", "embed_dim", model.embed_dim), ("tensor", "mlp_dim", model.mlp_dim)):
        blocks = size // math.gcd(size, NF4_BLOCK)
        if blocks % layout.size(axis):
            made = f"{blocks} block{'s' * (blocks > 1)} of model.{name} = {size}"
            what = f'= "nf4" makes {made}, which {axis} = {layout.size(axis)} does not divide'
            hint = f'use {axis}={or_list(near_divisors(blocks, layout.size(axis)))}, or base = "compute"'
            yield "lora.base", what, hint
