"""Compute causal attention on a TPU by splash attention, JAX's fused Pallas kernel.

It holds no [queries, keys] matrix, skips the blocks that causality masks whole, and keeps for the backward
pass its output and the log-sum-exp of the scores. Forward it is one kernel; backward there are two, each of
which computes the scores again. Source: jax.experimental.pallas.ops.tpu.splash_attention, which MaxText runs.

`takes` says which attention it takes. The rest (windows, several documents, `context`, lengths that no block
divides) runs in plain blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
from einops import rearrange
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float

LANES = 128  # columns of a TPU's vector register; a block is a multiple of it
HEAD_DIMS = 64  # heads that are multiples of it compile (tried with libtpu 0.0.42: 64, 128, 192, 256)
MOST_IN_A_BLOCK = 512  # MaxText's default for queries and keys, forward and backward (configs/base.yml)


def takes(length: int, head_dim: int, value_dim: int) -> bool:
    """Return whether the kernel takes whole windows of `length`, with heads of these widths."""
    return length % LANES == 0 and head_dim % HEAD_DIMS == 0 and head_dim == value_dim


def splash_attention(
    query: Float[Array, "batch sequence heads head_dim"],
    key: Float[Array, "batch sequence kv_heads head_dim"],
    value: Float[Array, "batch sequence kv_heads head_dim"],
    cap: float | None,
    name: str,
    *,
    interpret: bool = False,
) -> Float[Array, "batch sequence heads head_dim"]:
    """Attend from each position to itself and the earlier ones, on one device.

    Args:
        query, key, value: query heads share key heads in groups.
        cap: scores become cap x tanh(scores / cap); None leaves them as they are.
        name: a policy of rematerialisation that saves this name saves what the backward pass needs.
        interpret: run the kernel's program on any device, slowly.
    """
    length, heads = query.shape[1:3]
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
        block_sizes=_blocks(length),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name=name,
        interpret=interpret,
    )
    rows, keys, values = (rearrange(x, "b s h d -> b h s d") for x in (query, key, value))
    attend = cast("Callable[..., Array]", jax.vmap(kernel))  # it returns a pair if asked for the residuals
    out = attend(rows * query.shape[-1] ** -0.5, keys, values)
    return rearrange(out, "b h s d -> b s h d")


def _blocks(length: int) -> kernels.BlockSizes:
    size = next(size for size in range(MOST_IN_A_BLOCK, 0, -LANES) if length % size == 0)
    return kernels.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
