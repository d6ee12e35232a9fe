"""Causal attention: cuDNN's flash kernel on NVIDIA targets, blocks of queries elsewhere.

Both hold no [queries, keys] matrix for the whole sequence. In blocks, the matmuls of block i of n
compute (2i+2)/(2i+1) times what causality needs; the scope `needed_..._of_...` carries that ratio
to the counter of model FLOPs, so that every implementation counts the same.

Where a window holds several documents, attention stays inside each. The work is that of the whole
causal window, and counts as such: neither kernel leaves blocks out by document. cuDNN takes the mask
as a bias [batch, 1, sequence, sequence] in the format of the computation, made once for all layers,
and writes a gradient of it, as large, that nobody reads: 2 x 2 x sequence^2 bytes for each row of a
microbatch (64 MiB at 4096). Its form for packed sequences needs an upper limit of documents per row,
keeps statistics for each of them, and looks for the GPU while it is traced, so that no program could
be compiled for a target that is not there.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ..sharding import axis_size
from ._base import Context
from .parts import MAX_BLOCKS, MIN_BLOCK
from .ring import NAME, in_ring_order, ring_attention

CUDNN_MAX_HEAD_DIM = 128  # its gradient takes no more on every generation
# What JAX itself makes of a mask for cuDNN, which subtracts two very negative numbers wrongly.
CUDNN_BIAS = {"bfloat16": -2.0 * 2**40, "float16": -2.0 * 2**14}


def uses_cudnn(context: Context, head_dim: int) -> bool:
    """Whether attention goes to cuDNN: NVIDIA target, half precision, a head that fits its kernel."""
    half = jnp.dtype(context.dtype) in (jnp.dtype("bfloat16"), jnp.dtype("float16"))
    return context.platform == "cuda" and half and head_dim <= CUDNN_MAX_HEAD_DIM and head_dim % 8 == 0


class Documents(NamedTuple):
    """Where the documents of each window lie.

    `segments`: the document's number within its window, of each token. `positions`: the token's place in its
    document, or in what the window holds of it. `bias`: 0 where attention may look and very negative where
    it may not, for cuDNN [batch, 1, sequence, sequence]; None for blocks, which compare segments.
    """

    segments: Int[Array, "batch sequence"]
    positions: Int[Array, "batch sequence"]
    bias: Float[Array, "batch 1 sequence sequence"] | None


def documents_of(segments: Int[Array, "batch sequence"], context: Context, head_dim: int) -> Documents:
    """What the blocks need to know of documents, made once for all of them; over `context` in ring order.

    Segments are given in the order of the window, and never fall in a row.
    """
    ring = axis_size(context.mesh, "context") > 1
    with jax.named_scope("documents"):
        if not ring:
            segments = context.pin(segments, "batch", "sequence")
        places = jnp.broadcast_to(jnp.arange(segments.shape[1])[None], segments.shape)
        begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        firsts = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
        bias = None
        even = segments.shape[1] % 2 == 0  # a bias must be, for cuDNN
        if even and not ring and uses_cudnn(context, head_dim):
            same = segments[:, :, None] == segments[:, None, :]
            low = jnp.asarray(CUDNN_BIAS[jnp.dtype(context.dtype).name], context.dtype)
            bias = jnp.where(same, jnp.zeros((), context.dtype), low)
            bias = context.pin(bias, "batch", "sequence", "sequence")[:, None]
        segments, positions = (in_ring_order(x, context.mesh) for x in (segments, places - firsts))
        return Documents(segments, positions, bias)


def causal_attention(
    query: Float[Array, "batch sequence heads head_dim"],
    key: Float[Array, "batch sequence kv_heads head_dim"],
    value: Float[Array, "batch sequence kv_heads head_dim"],
    context: Context,
    documents: Documents | None = None,
) -> Float[Array, "batch sequence heads head_dim"]:
    """Each position attends to itself and those before it, of its document where there are documents.

    Query heads share key heads in groups. Where `context` splits the sequence it lies in ring order.
    """
    if axis_size(context.mesh, "context") > 1:
        with jax.named_scope("attention"):
            cudnn = _goes_to_cudnn(context, query.shape[-1], documents)
            segments = None if documents is None else documents.segments
            return ring_attention(query, key, value, segments, context.mesh, cudnn=cudnn)
    with jax.named_scope("attention"):
        local = partial(_on_one_device, cudnn=_goes_to_cudnn(context, query.shape[-1], documents))
        heads = ("batch", "sequence", "heads", "head_dim")
        kv_heads = ("batch", "sequence", "kv_heads", "head_dim")
        # By hand for each device: where a mesh is partly manual, cuDNN's own partitioner fails.
        each = context.on_each_device(local, (heads, kv_heads, kv_heads, ("batch",)), heads)
        out = each(query, key, value, documents)
        return checkpoint_name(context.pin(out, "batch", "sequence", "heads", "head_dim"), NAME)


def _goes_to_cudnn(context: Context, head_dim: int, documents: Documents | None) -> bool:
    return uses_cudnn(context, head_dim) and (documents is None or documents.bias is not None)


def _on_one_device(
    query: Array, key: Array, value: Array, documents: Documents | None, *, cudnn: bool
) -> Array:
    if not cudnn:
        return _in_blocks(query, key, value, None if documents is None else documents.segments)
    bias = None if documents is None else documents.bias
    return jax.nn.dot_product_attention(query, key, value, bias, is_causal=True, implementation="cudnn")


def _in_blocks(query: Array, key: Array, value: Array, segments: Array | None) -> Array:
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
            keys = None if segments is None else segments[:, :stop]
            outputs.append(
                block(grouped[:, :, :, start:stop], key[:, :, :stop], value[:, :, :stop], start, keys)
            )
    return rearrange(jnp.concatenate(outputs, axis=3), "b k g s d -> b s (k g) d")


def _block(
    query: Float[Array, "batch kv_heads group q head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys head_dim"],
    first_position: int,
    segments: Int[Array, "batch keys"] | None,
) -> Float[Array, "batch kv_heads group q head_dim"]:
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("bkgqd,bksd->bkgqs", query * scale, key).astype(jnp.float32)
    positions = first_position + jnp.arange(query.shape[3])
    causal = positions[:, None] >= jnp.arange(key.shape[2])[None, :]
    seen = causal[None, None, None]
    if segments is not None:
        same = segments[:, first_position:, None] == segments[:, None, :]
        seen = seen & same[:, None, None]
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgqs,bksd->bkgqd", weights, value)
