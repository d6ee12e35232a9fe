"""Define low-rank adapters (LoRA): the section of a run, and the sizes that its adapters have.

An adapter adds x A B alpha / rank to a product x W, whose W is frozen (Hu et al. 2021,
https://arxiv.org/abs/2106.09685). Keys and defaults are those of PEFT (`LoraConfig`), and products are named
as PEFT names a Llama's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import model_validator

from meshwright.errors import nearest_name

from ._layer_kinds import GLOBAL_ATTENTION
from ._models import Model
from ._section import OptionalPositive, PositiveFloat, Problem, Section, raise_problems
from ._transformer import TransformerModel

TARGETS: Mapping[str, tuple[str, str]] = {
    "q_proj": ("attention", "query"),
    "k_proj": ("attention", "key"),
    "v_proj": ("attention", "value"),
    "o_proj": ("attention", "output"),
    "gate_proj": ("mlp", "gate"),
    "up_proj": ("mlp", "up"),
    "down_proj": ("mlp", "down"),
}
"""Maps PEFT's name of a product to ours: the group of a block, and the name within it."""
ALL = "all-linear"
NF4_BLOCK = 64
"""The most numbers that share a scale with `base = "nf4"` (https://arxiv.org/abs/2305.14314, section 3)."""
LEAST_NF4_BLOCK = 16
"""The fewest: with smaller ones the scales would take more than a third of what is held."""


class LoraConfig(Section):
    """Low-rank adapters beside frozen products: the adapters are trained, and nothing else."""

    rank: OptionalPositive = None
    """Columns of each adapter's first matrix; `none` trains all parameters and has no adapters.
    Effect: gradients and moments exist for the adapters alone, whose parameters grow in proportion.
    Unit: columns"""
    alpha: PositiveFloat = 8.0
    """Multiplies what adapters add, divided by `rank`.
    Effect: the size of what is learned; nothing that is weighed. Unit: none"""
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Products that have adapters, by PEFT's names of a Llama's: q_proj, k_proj, v_proj, o_proj, gate_proj,
    up_proj, down_proj; or `["all-linear"]` for all of them.
    Effect: parameters, gradients and moments grow in proportion."""
    base: Literal["compute", "fp32", "nf4"] = "compute"
    """Format of the frozen matrices: that of the run's arithmetic, fp32, or QLoRA's four bits for products.
    Frozen norms stay in fp32.
    Effect: `compute` holds 2 bytes of a frozen parameter under bf16, fp16 and fp8; `fp32` holds 4. `nf4`
    holds 4.5 bits of those in the products of blocks, and computes them again for each use."""

    @property
    def scale(self) -> float:
        """Return the factor of an adapter's output, alpha / rank."""
        assert self.rank is not None, "a run without adapters has no scale"
        return self.alpha / self.rank

    def products(self, model: TransformerModel) -> tuple[tuple[str, str], ...]:
        """Return the group and name of each product that has an adapter, in the order of `TARGETS`."""
        everything = ALL in self.targets
        chosen = tuple(
            place
            for name, place in TARGETS.items()
            if name in self.targets or (everything and (name != "gate_proj" or model.mlp == "gated"))
        )
        if model.global_head_dim is None:
            return chosen
        of_attention = [name for group, name in chosen if group == "attention"]
        left_out = ["value"] if model.global_key_is_value else []
        return (*chosen, *((GLOBAL_ATTENTION, name) for name in of_attention if name not in left_out))

    def num_parameters(self, model: TransformerModel) -> int:
        """Return the number of parameters of all adapters: L x rank x (inputs + outputs) of each product."""
        (attention, count), *others = model.attentions
        layers = {"attention": (attention, count), "mlp": (model, model.count(mlp="mlp"))}
        if others:
            layers[GLOBAL_ATTENTION] = others[0]
        sizes = {group: adapter_sizes(of) for group, (of, _) in layers.items()}
        each = sum(layers[group][1] * sum(sizes[group][name]) for group, name in self.products(model))
        return (self.rank or 0) * each

    @model_validator(mode="after")
    def _targets_are_known(self) -> LoraConfig:
        unknown = [name for name in self.targets if name not in (*TARGETS, ALL)]
        problems = [
            (
                "targets",
                f"holds {name!r}, which is no product of a block",
                nearest_name(name, (*TARGETS, ALL)),
            )
            for name in unknown
        ]
        if not self.targets:
            problems = [("targets", "is empty, so that nothing would be trained", 'use ["q_proj", "v_proj"]')]
        raise_problems(problems)
        return self


def adapter_sizes(model: TransformerModel) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of each product of a block, by its name."""
    width, hidden = model.embed_dim, model.mlp_dim
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "query": (width, heads),
        "key": (width, keys),
        "value": (width, keys),
        "output": (heads, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }


def lora_problems(lora: LoraConfig, model: Model, *, zero1: bool) -> Iterator[Problem]:
    """Yield what adapters cannot be combined with; paths start at the run."""
    if lora.rank is None:
        return
    if not isinstance(model, TransformerModel):
        what = f"= {lora.rank}, but a {model.kind} model has no products with adapters"
        yield "lora.rank", what, "leave lora out"
        return
    chosen = {group for group, _ in lora.products(model)}
    if model.num_experts is not None and "mlp" in chosen:
        what = "has products of the MLP, and experts have no adapters"
        yield "lora.targets", what, 'use ["q_proj", "k_proj", "v_proj", "o_proj"]'
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
    if model.mlp == "plain" and "gate_proj" in lora.targets:
        yield "lora.targets", "has 'gate_proj', and a plain MLP has no gate", "leave gate_proj out"
    if zero1:
        what = "= true divides parameters and moments that are trained over data; with lora those are few"
        yield "zero1", what, "use zero1 = false; fsdp divides the frozen parameters"


def _nf4_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield what cannot be held in four bits."""
    if model.num_experts is not None:
        yield (
            "lora.base",
            '= "nf4", but matrices of experts are not held in four bits',
            'use base = "compute"',
        )
    for name in ("head_dim", "embed_dim", "mlp_dim"):
        size = getattr(model, name)
        if math.gcd(size, NF4_BLOCK) < LEAST_NF4_BLOCK:
            what = f'= "nf4" gives a scale to every {LEAST_NF4_BLOCK} to {NF4_BLOCK} numbers side by side, '
            yield "lora.base", f"{what}which do not divide {name} = {size}", 'use base = "compute"'
