"""Causal attention: cuDNN's flash kernel on NVIDIA targets, blocks of queries elsewhere.

Both hold no [queries, keys] matrix for the whole sequence. In blocks, the matmuls of block i of n
compute (2i+2)/(2i+1) times what causality needs; the scope `needed_..._of_...` carries that ratio
to the counter of model FLOPs, so that every implementation counts the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ._base import Context

MAX_BLOCKS = 16
MIN_BLOCK = 128
NAME = "attention_output"  # what the policy `dots-attention` saves
CUDNN_MAX_HEAD_DIM = 128  # its gradient takes no more on every generation


def uses_cudnn(context: Context, head_dim: int) -> bool:
    """Whether attention goes to cuDNN: NVIDIA target, half precision, a head that fits its kernel."""
    half = jnp.dtype(context.dtype) in (jnp.dtype("bfloat16"), jnp.dtype("float16"))
    return context.platform == "cuda" and half and head_dim <= CUDNN_MAX_HEAD_DIM and head_dim % 8 == 0


def causal_attention(
    query: Float[Array, "batch sequence heads head_dim"],
    key: Float[Array, "batch sequence kv_heads head_dim"],
    value: Float[Array, "batch sequence kv_heads head_dim"],
    context: Context,
) -> Float[Array, "batch sequence heads head_dim"]:
    """Each position attends to itself and those before it; query heads share key heads in groups."""
    with jax.named_scope("attention"):
        if uses_cudnn(context, query.shape[-1]):
            out = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        else:
            out = _in_blocks(query, key, value)
        return checkpoint_name(context.pin(out, "batch", "sequence", "heads", "head_dim"), NAME)


def _in_blocks(query: Array, key: Array, value: Array) -> Array:
    length = query.shape[1]
    size = max(MIN_BLOCK, -(-length // MAX_BLOCKS))
    # Head-major once, here: left to itself each matmul below transposes its own operands.
    grouped = rearrange(query, "b s (k g) d -> b k g s d", k=key.shape[2])
    key, value = (rearrange(x, "b s k d -> b k s d") for x in (key, value))
    outputs = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        with jax.named_scope(f"needed_{start + stop}_of_{2 * stop}"):
            block = jax.checkpoint(_block, static_argnums=3)
            outputs.append(block(grouped[:, :, :, start:stop], key[:, :, :stop], value[:, :, :stop], start))
    return rearrange(jnp.concatenate(outputs, axis=3), "b k g s d -> b s (k g) d")


def _block(
    query: Float[Array, "batch kv_heads group q head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys head_dim"],
    first_position: int,
) -> Float[Array, "batch kv_heads group q head_dim"]:
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("bkgqd,bksd->bkgqs", query * scale, key).astype(jnp.float32)
    positions = first_position + jnp.arange(query.shape[3])
    causal = positions[:, None] >= jnp.arange(key.shape[2])[None, :]
    scores = jnp.where(causal[None, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgqs,bksd->bkgqd", weights, value)
