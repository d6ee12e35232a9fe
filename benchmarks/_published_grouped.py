"""Count what Megatron Core runs for a layer of experts where our program runs something else.

Grouped products reach less of the chip the narrower an expert is. Kernels that move rows are Transformer
Engine's and the dispatcher's (https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe:
experts.py, token_dispatcher.py, moe_utils.py), counted by the bytes that they read and write.
Not counted: how unequal experts are, which the published runs balance.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _published_mamba import copied_bytes
from _published_narrow import without_casts
from _published_sizes import Sizes

from meshwright.compiler import Routing
from meshwright.predict._rates import Machine

# Bytes of a layer's elementwise kernels by token, forward and backward, in 16 bits. By the width, for the
# mixer and for the MLP: a norm and a sum of residuals; by queries: rotation and gradients; by keys the same,
# with the gradients of values. As in `_published_stacks`, apart here because experts' models have queries
# wider than the layer.
PART_BYTES, QUERY_BYTES, KEY_BYTES = 24.0, 12.0, 16.0
HEAD_NORM_BYTES = 12.0  # by queries and keys, where heads are normalised
# By queries and keys, where rotation scales them too (YaRN), which no fused kernel does
# (megatron/core/models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd). Forward: two products
# with cosines and sines 4 each, half negated 2, halves joined 4, sum 6, an empty rest joined 4.
# Backward: two products 4 each, half negated 2, halves joined 4, sum 6, two slices 6 and 2, their sum 6. The
# fused kernel's 8 are part of QUERY_BYTES and KEY_BYTES.
SCALED_ROTATION_BYTES = 50.0
# By chosen experts and width, in each direction. A row for each choice: it is put in the order of devices,
# after the exchange in that of experts, and back twice (token_dispatcher.py, MoEAlltoAllTokenDispatcher):
# three times read and written, and once read. Sent once: the dispatcher writes rows in the experts' order
# (read 2, write 2) and reads results (2), whose sums it writes, one for each device that a token reaches
# (fused_a2a.py).
BY_CHOICE_BYTES, ONCE_BYTES, SUM_BYTES = 14.0, 6.0, 2.0
# In 8 bits rows and gradients are read once more, and written as they are and transposed
# (transformer_engine/pytorch/module/grouped_linear.py, split_quantize): by the width, and by experts' width
# what leaves an activation and, twice as wide if gated, its gradient, unless a fused kernel writes them so.
CAST_BYTES, CAST_HIDDEN_BYTES, CAST_PLAIN_HIDDEN_BYTES = 8.0, 12.0, 8.0
# By chosen and shared experts and their width, gated or not: forward 6 or 4, backward 10 or 6.
ACTIVATION_BYTES, PLAIN_ACTIVATION_BYTES = 16.0, 10.0
# In 8 bits, by the width, as in `_published_stacks`: attention's output and its gradient, an MLP's gradient.
CAST_MIXER_BYTES, CAST_MLP_BYTES = 8.0, 4.0
# Biases of experts (megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias): an eager product
# with the router's weight, a sum and a concatenation, by chosen experts and width, with their gradients.
# DeepEP and HybridEP return weights in float32, in which all of that is then computed. A bound on a gated
# unit (megatron/core/fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl): two clamps and a
# concatenation outside of the fused kernel, by chosen experts and their width, forward 16 and backward 20.
BIAS_BYTES, WIDE_BIAS_BYTES, BOUND_BYTES, BOUND_AGAIN_BYTES = 28.0, 68.0, 36.0, 16.0
# What `repeats` computes again: a norm for each part of a layer, or the activation.
NORM_AGAIN_BYTES, ACTIVATION_AGAIN_BYTES, PLAIN_AGAIN_BYTES = 4.0, 6.0, 4.0
# Not counted: a step in one graph keeps what experts save in pages, and copies it there and back on a stream
# of its own (megatron/core/transformer/moe/paged_stash.py), beside the kernels around the experts.
# Launches of a layer and microbatch by local expert: Transformer Engine's grouped linear layers cast, swizzle
# scales and multiply each expert by itself (transformer_engine/pytorch/module/grouped_linear.py): forward 4
# of each of two layers, backward 7. Each asks cuBLAS for a heuristic or allocates: between the 5 us of a
# launch and the 20 us of an operation; chosen in sight of the errors of rows of one sequence. A bias of an
# expert is applied by itself: forward 2, backward 5.
LAUNCHES_OF_EXPERT, LAUNCHES_OF_BIAS, LAUNCH_SECONDS = 22, 7, 15e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels a stack has around experts: see `Stack`.

    `fused`: activations and biases are in grouped products.
    """

    eight_bits: bool = False
    fused: bool = False
    sends_once: bool = False
    repeats: tuple[str, ...] = ()


def layer_bytes(sizes: Sizes, kernels: Kernels) -> float:
    """Return the bytes of a token in a layer, forward and backward: the mean over all layers of the model.

    Those of Mamba-2's own kernels are not among them: `_published_mamba` prices these.
    """
    model = sizes.model
    part = PART_BYTES + (NORM_AGAIN_BYTES if "norms" in kernels.repeats else 0.0)
    mixer = part + (CAST_MIXER_BYTES if kernels.eight_bits else 0.0)
    mlp = part + (CAST_MLP_BYTES if kernels.eight_bits else 0.0)
    activation = ACTIVATION_BYTES if model.mlp == "gated" else PLAIN_ACTIVATION_BYTES
    bytes_of: dict[str | None, float] = {
        None: 0.0,
        "attention": mixer * model.embed_dim + _attention_bytes(sizes),
        "mamba": mixer * model.embed_dim + copied_bytes(sizes, eight_bits=kernels.eight_bits),
        "mlp": mlp * model.embed_dim + activation * (model.dense_mlp_dim or model.mlp_dim),
        "experts": mlp * model.embed_dim + activation * model.shared_dim + experts_bytes(sizes, kernels),
    }
    return math.fsum(bytes_of[kind.mixer] + bytes_of[kind.mlp] for kind in model.kinds) / model.num_layers


def _attention_bytes(sizes: Sizes) -> float:
    """Return the bytes of a token in a layer of attention beside those by the width."""
    model = sizes.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    normed = HEAD_NORM_BYTES * (queries + keys) if model.qk_norm != "none" else 0.0
    turned = SCALED_ROTATION_BYTES * (queries + keys) if model.rope_gain != 1 else 0.0
    return QUERY_BYTES * queries + KEY_BYTES * keys + normed + turned


def experts_bytes(sizes: Sizes, kernels: Kernels) -> float:
    """Return that part of `layer_bytes` that belongs to the chosen experts."""
    model, devices = sizes.model, sizes.experts_apart
    assert model.num_experts is not None
    assert model.experts_per_token is not None
    chosen = model.experts_per_token
    rows = 2 * BY_CHOICE_BYTES * chosen
    if kernels.sends_once:
        routing = Routing(num_experts=model.num_experts, num_chosen=chosen)
        rows = 2 * (ONCE_BYTES * chosen + SUM_BYTES * devices * routing.reached(devices))
    rows += CAST_BYTES * chosen if kernels.eight_bits else 0.0
    hidden = 0.0
    if not kernels.fused:
        hidden = ACTIVATION_BYTES if model.mlp == "gated" else PLAIN_ACTIVATION_BYTES
        hidden += BOUND_BYTES if model.gate_limit is not None else 0.0
        if kernels.eight_bits:
            hidden += CAST_HIDDEN_BYTES if model.mlp == "gated" else CAST_PLAIN_HIDDEN_BYTES
        if model.expert_bias:
            rows += chosen * (WIDE_BIAS_BYTES if kernels.sends_once else BIAS_BYTES)
    if "activation" in kernels.repeats:
        hidden += ACTIVATION_AGAIN_BYTES if model.mlp == "gated" else PLAIN_AGAIN_BYTES
        hidden += BOUND_AGAIN_BYTES if model.gate_limit is not None else 0.0
    return rows * model.embed_dim + hidden * chosen * model.mlp_dim


def launch_seconds(sizes: Sizes) -> float:
    """Return the seconds in which a host launches a device's own experts in a layer and microbatch."""
    assert sizes.model.num_experts is not None
    launches = LAUNCHES_OF_EXPERT + (LAUNCHES_OF_BIAS if sizes.model.expert_bias else 0)
    return LAUNCH_SECONDS * launches * sizes.model.num_experts / sizes.experts_apart


def again_seconds(sizes: Sizes, machine: Machine, *, eight_bits: bool) -> float:
    """Return the seconds of a layer's products from latents to queries, keys and values, of a microbatch."""
    model = sizes.model
    if model.latent_rank is None:
        return 0.0
    turned, value = model.rotary_dim or 0, model.value_dim or model.head_dim
    shapes = [(model.num_heads * (model.head_dim - turned + value), model.latent_rank)]
    if model.query_rank is not None:
        shapes.append((model.num_heads * model.head_dim, model.query_rank))
    name, each = ("fp8-e4m3", 1) if eight_bits else ("bf16", 2)
    return math.fsum(
        float(
            machine.product_seconds(
                name, m=sizes.tokens, n=n, k=k, batch=1, num_bytes=each * (sizes.tokens * k + k * n)
            )
        )
        for n, k in shapes
    )


def grouped_seconds(sizes: Sizes, machine: Machine, *, eight_bits: bool) -> tuple[float, float]:
    """Return the seconds of a layer's grouped products as measured, and as we price ours; of a microbatch."""
    model, devices = sizes.model, sizes.experts_apart
    assert model.num_experts is not None
    local = model.num_experts // devices
    rows = sizes.tokens_of_experts * (model.experts_per_token or 0) / local
    peaks = machine.peak_flops_per_second
    format_name = "fp8-e4m3" if eight_bits else "bf16"
    each = 1 if eight_bits else 2
    d, f = model.embed_dim, model.mlp_dim / sizes.tensor_of_experts

    def seconds(on: Machine, m: float, n: float, k: float) -> float:
        moved = local * (each * (m * k + k * n) + 2 * m * n)
        return float(on.product_seconds(format_name, m=m, n=n, k=k, batch=local, num_bytes=moved))

    def all_seconds(on: Machine) -> float:
        up = seconds(on, rows, f, d) + seconds(on, rows, d, f) + seconds(on, d, f, rows)
        return before * up + seconds(on, rows, d, f) + seconds(on, rows, f, d) + seconds(on, f, d, rows)

    before = 2 if model.mlp == "gated" else 1  # gate and up
    alone = all_seconds(without_casts(machine))
    flops = 3 * (before + 1) * 2 * local * rows * d * f
    share = grouped_share(machine.name, model.mlp_dim)
    measured = alone if share is None else max(alone, flops / (peaks[format_name] * share))
    return measured, all_seconds(machine)


@functools.cache
def _tables() -> Mapping[str, Any]:
    text = (Path(__file__).parent / "published_assumptions.toml").read_text()
    return tomllib.loads(text)["grouped_products"]


def grouped_share(chip: str, width: int) -> float | None:
    """Return the share of the peak that grouped products of experts of a width reach; None if not known.

    Between measured widths it follows the logarithm of the width.
    """
    tables = _tables()
    found = next((table for table in tables["of"] if chip in table["chips"]), None)
    if found is None:
        return None
    return float(np.interp(math.log(width), np.log(tables["widths"]), found["shares"]))
