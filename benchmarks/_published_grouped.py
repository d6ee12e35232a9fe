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
from _published_sizes import Sizes

from meshwright.compiler import Routing
from meshwright.predict import reached
from meshwright.predict._rates import Machine

# Bytes of a layer's elementwise kernels by token, forward and backward, in 16 bits. By the width: two norms,
# two sums of residuals; by queries: rotation and gradients; by keys the same, with the gradients of values.
# As in `_published_stacks`, apart here because experts' models have queries wider than the layer.
WIDTH_BYTES, QUERY_BYTES, KEY_BYTES = 48.0, 12.0, 16.0
HEAD_NORM_BYTES = 12.0  # by queries and keys, where heads are normalised
# By chosen experts and width, in each direction. A row for each choice: it is put in the order of devices,
# after the exchange in that of experts, and back twice (token_dispatcher.py, MoEAlltoAllTokenDispatcher):
# three times read and written, and once read. Sent once: the dispatcher writes rows in the experts' order
# (read 2, write 2) and reads results (2), whose sums it writes, one for each device that a token reaches
# (fused_a2a.py).
BY_CHOICE_BYTES, ONCE_BYTES, SUM_BYTES = 14.0, 6.0, 2.0
# In 8 bits rows and gradients are read once more, and written as they are and transposed.
CAST_BYTES = 8.0
ACTIVATION_BYTES = 16.0  # by chosen and shared experts and their width: forward 6, backward 10
CAST_WIDTH_BYTES = 12.0  # in 8 bits, by the width: as `_published_stacks` has it for attention and MLP
# A step in one graph keeps what experts save in pages (moe_paged_stash): by chosen experts, the input (1 byte
# of its width), the gated units (2 bytes of twice the experts' width) and the hidden ones (1 byte) are copied
# there and back, each read and written.
STASHED_COPIES = 4
# Launches of a layer and microbatch by local expert: Transformer Engine's grouped linear layers cast, swizzle
# scales and multiply each expert by itself (transformer_engine/pytorch/module/grouped_linear.py): forward 4
# of each of two layers, backward 7. Each asks cuBLAS for a heuristic or allocates: between the 5 us of a
# launch and the 20 us of an operation; chosen in sight of the errors of rows of one sequence.
LAUNCHES_OF_EXPERT, LAUNCH_SECONDS = 22, 15e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels a stack has around experts: see `Stack`. `fused`: activations are in grouped products."""

    eight_bits: bool = False
    fused: bool = False
    sends_once: bool = False


def layer_bytes(sizes: Sizes, kernels: Kernels) -> float:
    """Return the bytes of a token in a layer of experts, forward and backward."""
    model = sizes.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    moved = WIDTH_BYTES * model.embed_dim + QUERY_BYTES * queries + KEY_BYTES * keys
    moved += HEAD_NORM_BYTES * (queries + keys) if model.qk_norm != "none" else 0.0
    moved += ACTIVATION_BYTES * model.num_shared_experts * model.mlp_dim
    moved += CAST_WIDTH_BYTES * model.embed_dim if kernels.eight_bits else 0.0
    return moved + experts_bytes(sizes, kernels)


def experts_bytes(sizes: Sizes, kernels: Kernels) -> float:
    """Return that part of `layer_bytes` that belongs to the chosen experts."""
    model, devices = sizes.model, sizes.experts_apart
    assert model.num_experts is not None
    assert model.experts_per_token is not None
    chosen = model.experts_per_token
    rows = 2 * BY_CHOICE_BYTES * chosen
    if kernels.sends_once:
        routing = Routing(num_experts=model.num_experts, num_chosen=chosen)
        rows = 2 * (ONCE_BYTES * chosen + SUM_BYTES * devices * reached(routing, devices))
    rows += CAST_BYTES * chosen if kernels.eight_bits else 0.0
    hidden = 0.0 if kernels.fused else ACTIVATION_BYTES
    return rows * model.embed_dim + hidden * chosen * model.mlp_dim


def stashed_bytes(sizes: Sizes) -> float:
    """Return the bytes of a token in a layer of experts that copies to pages and back read and write."""
    model = sizes.model
    return STASHED_COPIES * (model.experts_per_token or 0) * (model.embed_dim + 5 * model.mlp_dim)


def launch_seconds(sizes: Sizes) -> float:
    """Return the seconds in which a host launches a device's own experts in a layer and microbatch."""
    assert sizes.model.num_experts is not None
    return LAUNCH_SECONDS * LAUNCHES_OF_EXPERT * sizes.model.num_experts / sizes.experts_apart


def grouped_seconds(sizes: Sizes, machine: Machine, *, eight_bits: bool) -> tuple[float, float]:
    """Return the seconds of a layer's grouped products as measured, and as we price ours; of a microbatch."""
    model, devices = sizes.model, sizes.experts_apart
    assert model.num_experts is not None
    local = model.num_experts // devices
    rows = sizes.tokens * (model.experts_per_token or 0) / local
    peaks = machine.peak_flops_per_second
    format_name = "fp8-e4m3" if eight_bits else "bf16"
    each = 1 if eight_bits else 2
    d, f = model.embed_dim, model.mlp_dim / sizes.tensor_of_experts

    def seconds(m: float, n: float, k: float) -> float:
        moved = local * (each * (m * k + k * n) + 2 * m * n)
        return float(machine.product_seconds(format_name, m=m, n=n, k=k, batch=local, num_bytes=moved))

    ours = 2 * (seconds(rows, f, d) + seconds(rows, d, f) + seconds(d, f, rows))  # gate and up
    ours += seconds(rows, d, f) + seconds(rows, f, d) + seconds(f, d, rows)
    flops = 3 * 3 * 2 * local * rows * d * f
    share = grouped_share(machine.name, model.mlp_dim)
    measured = ours if share is None else max(ours, flops / (peaks[format_name] * share))
    return measured, ours


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
