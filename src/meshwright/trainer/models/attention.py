"""Compute causal attention: on one device's sequence, or over the mesh axis `context`.

Kernels: cuDNN's flash kernel on NVIDIA targets, splash attention on TPUs, blocks of queries in plain JAX
(`attention_blocks`) elsewhere. None holds a [queries, keys] matrix for the whole sequence. All save the
output and the log-sum-exp of each query's scores, and compute the scores again in the backward pass.

In blocks, the matmuls of block i of n compute (2i+2)/(2i+1) times what causality needs. The scope
`needed_..._of_...` passes that ratio to the counter of model FLOPs, so that every implementation counts the
same.

Documents: if a window holds several documents, attention stays inside each. The work is still that of the
whole causal window, and counts as such: neither kernel skips blocks by document. cuDNN takes the mask as a
bias [batch, 1, sequence, sequence] in the compute format, built once for all layers. It also writes the
bias's gradient, which has the same size and is never read: 2 x 2 x sequence^2 bytes in total for each row of
a microbatch (64 MiB at 4096). cuDNN's variant for packed sequences is not used. It needs an upper limit of
documents per row and keeps statistics for each. It also queries the GPU while it is traced, so a program
could not be compiled for a target that is not present.

Order: with N devices, the sequence has 2N equal pieces, and device i holds pieces i and 2N-1-i (zigzag), so
that all devices have the same work. Keys and values of whole windows are gathered for one layer at a time
if that takes little memory, and in layers where a token sees a window. Otherwise, and
if windows hold several documents, they go round a ring. Both are a room outside the core.

Sinks change the output and the log-sum-exp that a kernel has found (`attention_sinks`), so every road but
splash attention's takes them; on a TPU they run in plain blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meshwright.config import MOST_GATHERED_BYTES
from meshwright.sharding import AnyMesh, activation_spec, axis_size, on_each_device, pin, ring_size

from ._base_model import Context
from .attention_blocks import (
    AXIS,
    Blocks,
    Cudnn,
    Gradients,
    Kernel,
    Part,
    PartResult,
    cudnn_attention,
    in_eights,
)

NAME = "attention_output"  # the policy `dots-attention` saves this
HEADS = ("batch", "sequence", "heads", "head_dim")
KV_HEADS = ("batch", "sequence", "kv_heads", "head_dim")
Saved = tuple[Array, Array, Array, Array | None, Array | None, PartResult]


class Shape(NamedTuple):
    """The shape of attention, apart from causality.

    `window`: the positions that a token sees, its own included; None for all. `cap`: scores become
    cap x tanh(scores / cap); None leaves them as they are (Gemma 2, https://arxiv.org/abs/2408.00118).
    """

    window: int | None = None
    cap: float | None = None


PLAIN = Shape()


def in_ring_order(x: Array, mesh: AnyMesh) -> Array:
    """Reorder `x` [batch, sequence] to ring order; return it unchanged if `context` has one device.

    Where `context` is manual, return this device's part of it.
    """
    size = ring_size(mesh)
    if size == 1:
        return x

    def local(x: Array) -> Array:
        num, device = x.shape[1] // (2 * size), jax.lax.axis_index(AXIS)
        pieces = (device, 2 * size - 1 - device)
        return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, p * num, num, 1) for p in pieces], axis=1)

    whole, split = activation_spec(("batch",), mesh), activation_spec(("batch", "sequence"), mesh)
    return on_each_device(local, mesh, (whole,), split)(x)


def ring_positions(length: int, mesh: AnyMesh) -> Int[Array, " sequence"]:
    """Return each token's position in its window, in ring order; 0, 1, 2, ... if `context` has one device.

    Where `context` is manual, `length` and the positions are those of this device's part.
    """
    size = ring_size(mesh)
    if size == 1:
        return jnp.arange(length)
    # Two pieces per device, `num` slots each.
    slot, num = jnp.arange(length), length // (2 * axis_size(mesh, AXIS))
    device = jax.lax.axis_index(AXIS) if AXIS in mesh.manual_axes else slot // (2 * num)
    second, place = slot // num % 2, slot % num
    piece = jnp.where(second == 1, 2 * size - 1 - device, device)
    return pin(piece * num + place, mesh, "sequence")


def gathers(key: Array, segments: Array | None, size: int) -> bool:
    """Return whether keys and values are gathered: both of whole windows take `MOST_GATHERED_BYTES` or less.

    Args:
        key: one device's keys.
        segments: of several documents in a window, which plain blocks read piece by piece; None for one.
        size: the number of devices that share a sequence.
    """
    return segments is None and 2 * size * key.size * key.dtype.itemsize <= MOST_GATHERED_BYTES


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def kernel_attention(
    query: Float[Array, "batch sequence heads head_dim"],
    key: Float[Array, "batch sequence kv_heads head_dim"],
    value: Float[Array, "batch sequence kv_heads value_dim"],
    segments: Int[Array, "batch sequence"] | None,
    sinks: Float[Array, " heads"] | None,
    mesh: AnyMesh,
    kernel: Kernel,
    window: int | None = None,
) -> Float[Array, "batch sequence heads value_dim"]:
    """Compute causal attention by `kernel`, within each segment if segments are given, with sinks if given.

    Saved for the backward pass are the output and the log-sum-exp of the scores; scores are computed again.
    If `context` shards the sequence, it is in ring order. `Cudnn` takes no segments.
    """
    return _forward(query, key, value, segments, sinks, mesh, kernel, window)[0]


def _specs(mesh: AnyMesh) -> tuple[tuple[PartitionSpec, ...], Any]:
    """Return the PartitionSpecs of query, key, value and segments, and those of the `PartResult`."""
    heads, kv_heads = activation_spec(HEADS, mesh), activation_spec(KV_HEADS, mesh)
    tokens = activation_spec(("batch", "sequence"), mesh)
    both: tuple[Any, Any] = heads, activation_spec(("batch", "heads", "sequence"), mesh)
    return (heads, kv_heads, kv_heads, tokens), PartResult(*both)


def _whole(query: Array, key: Array, value: Array, segments: Array | None, window: int | None) -> Part:
    """Return the part in which the queries of a whole window attend to its keys."""
    return Part(query, key, value, None if segments is None else (segments, segments), window)


def _forward(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    sinks: Array | None,
    mesh: AnyMesh,
    kernel: Kernel,
    window: int | None,
) -> tuple[Array, Saved]:
    arguments, result_spec = _specs(mesh)
    size = ring_size(mesh)

    def local(query: Array, key: Array, value: Array, segments: Array | None) -> PartResult:
        if size == 1:
            result = kernel.forward(_whole(query, key, value, segments, window), True)
            return result._replace(out=result.out.astype(query.dtype))
        from meshwright.registry import room

        over_context = room("context_attention")
        is_gathered = gathers(key, segments, size)
        return over_context.forward(kernel, size, query, key, value, segments, window, is_gathered)

    result = on_each_device(local, mesh, arguments, result_spec)(query, key, value, segments)
    if sinks is not None:
        from .attention_sinks import with_sinks

        result = PartResult(*with_sinks(result.out, result.log_sum_exp, sinks))
    result = PartResult(*(checkpoint_name(x, NAME) for x in result))
    return result.out, (query, key, value, segments, sinks, result)


def _backward(
    mesh: AnyMesh, kernel: Kernel, window: int | None, saved: Saved, d_out: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    arguments, result_spec = _specs(mesh)
    size = ring_size(mesh)
    *inputs, sinks, result = saved
    d_sinks = None
    if sinks is not None:
        from .attention_sinks import gradient_of_sinks

        d_sinks = gradient_of_sinks(result.out, result.log_sum_exp, sinks, d_out)

    def local(
        query: Array, key: Array, value: Array, segments: Array | None, result: PartResult, d_out: Array
    ) -> Gradients:
        if size == 1:
            # Where layers are unrolled, XLA would otherwise keep the scores of the forward pass. Its compiler
            # for CPUs removes the barrier before it merges equal products, and may keep them all the same.
            query, key, value = jax.lax.optimization_barrier((query, key, value))
            part = _whole(query, key, value, segments, window)
            d_query, d_key, d_value = kernel.backward(part, True, result, d_out)
            return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)
        from meshwright.registry import room

        over_context = room("context_attention")
        inputs = (query, key, value, segments, window, gathers(key, segments, size))
        return over_context.backward(kernel, size, *inputs, result, d_out)

    each = on_each_device(local, mesh, (*arguments, result_spec, result_spec.out), arguments[:3])
    return *each(*inputs, result, d_out), None, d_sinks


kernel_attention.defvjp(_forward, _backward)


# The values that JAX itself uses for masks: cuDNN subtracts two very negative numbers wrongly.
CUDNN_BIAS = {"bfloat16": -2.0 * 2**40, "float16": -2.0 * 2**14}


def uses_cudnn(context: Context, head_dim: int, value_dim: int | None = None) -> bool:
    """Return whether cuDNN can attend: NVIDIA target, half precision, heads that its kernels take.

    Its gradient takes heads of up to 128 on every generation, up to 256 on Hopper (9.x), and 192 with values
    of 128 on Blackwell of data centres (10.x). Values of another width than keys need one of the two. Heads
    of other widths than multiples of 8 are filled with zeros, except over `context`. Source: validation of
    the backward node in NVIDIA's cudnn-frontend 1.23 (scaled_dot_product_flash_attention.h).

    Args:
        context: of the run.
        head_dim: the width of queries and keys.
        value_dim: the width of values; None for `head_dim`.
    """
    half = jnp.dtype(context.dtype) in (jnp.dtype("bfloat16"), jnp.dtype("float16"))
    value_dim = head_dim if value_dim is None else value_dim
    widths = in_eights(head_dim), in_eights(value_dim)
    is_filled = widths != (head_dim, value_dim)
    if context.platform != "cuda" or not half:
        return False
    if is_filled and (head_dim != value_dim or ring_size(context.mesh) > 1):
        return False
    generation = context.compute_capability[0]
    if max(widths) <= 128:
        return widths[0] == widths[1] or generation in (9, 10)
    return max(widths) <= 256 if generation == 9 else generation == 10 and widths == (192, 128)


class Documents(NamedTuple):
    """The documents of each window, per token.

    `segments`: the number of the token's document within the window. `positions`: the token's position in its
    document, counted from the first token that the window holds. `bias`: cuDNN's mask, 0 where attention is
    allowed and very negative elsewhere; None for blocks, which compare segments.
    """

    segments: Int[Array, "batch sequence"]
    positions: Int[Array, "batch sequence"]
    bias: Float[Array, "batch 1 sequence sequence"] | None


def documents_of(
    segments: Int[Array, "batch sequence"], context: Context, head_dim: int, value_dim: int | None = None
) -> Documents:
    """Return the `Documents` that all layers share, in ring order if `context` shards the sequence.

    `segments` are in the order of the window and never decrease within a row.
    """
    ring = ring_size(context.mesh) > 1
    with jax.named_scope("documents"):
        if not ring:
            segments = context.pin(segments, "batch", "sequence")
        places = jnp.broadcast_to(jnp.arange(segments.shape[1])[None], segments.shape)
        begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        firsts = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
        bias = None
        even = segments.shape[1] % 2 == 0  # cuDNN requires an even length with a bias
        if even and not ring and uses_cudnn(context, head_dim, value_dim):
            same = segments[:, :, None] == segments[:, None, :]
            low = jnp.asarray(CUDNN_BIAS[jnp.dtype(context.dtype).name], context.dtype)
            bias = jnp.where(same, jnp.zeros((), context.dtype), low)
            bias = context.pin(bias, "batch", "sequence", "sequence")[:, None]
        segments, positions = (in_ring_order(x, context.mesh) for x in (segments, places - firsts))
        return Documents(segments, positions, bias)


def causal_attention(
    query: Float[Array, "batch sequence heads head_dim"],
    key: Float[Array, "batch sequence kv_heads head_dim"],
    value: Float[Array, "batch sequence kv_heads value_dim"],
    context: Context,
    documents: Documents | None = None,
    shape: Shape = PLAIN,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch sequence heads value_dim"]:
    """Attend from each position to itself and the earlier ones, within its document if `documents` is given.

    Query heads share key heads in groups. If `context` shards the sequence, it is in ring order. cuDNN has
    windows where windows hold one document; capped scores run in plain blocks. `sinks` are scores of each
    head that weigh nothing.
    """
    length = query.shape[1] * ring_size(context.mesh) // axis_size(context.mesh, AXIS)
    if shape.window is not None and shape.window >= length:
        shape = shape._replace(window=None)
    cudnn = uses_cudnn(context, query.shape[-1], value.shape[-1]) and (
        documents is None or (documents.bias is not None and shape.window is None)
    )
    cudnn = cudnn and shape.cap is None
    is_ring = ring_size(context.mesh) > 1
    assert not is_ring or value.shape == key.shape, "check_layout refuses other widths over a ring"
    whole = documents is None and shape.window is None and sinks is None and not is_ring
    splash = whole and context.platform == "tpu" and _splash_takes(length, query, value)
    with jax.named_scope("attention"):
        if splash or (cudnn and not is_ring):
            # Run per device (`shard_map`): on a partly manual mesh, cuDNN's own partitioner fails.
            local = partial(_fused, cudnn=cudnn, shape=shape)
            inputs = (HEADS, KV_HEADS, KV_HEADS, ("batch",), ("heads",))
            each = context.on_each_device(local, inputs, HEADS)
            bias = None if documents is None else documents.bias
            return context.pin(each(query, key, value, bias, sinks), *HEADS)
        kernel = Cudnn() if cudnn else Blocks(shape.cap, context.platform)
        segments = None if documents is None else documents.segments
        out: Any = kernel_attention(query, key, value, segments, sinks, context.mesh, kernel, shape.window)
        return out if is_ring else context.pin(out, *HEADS)


def _splash_takes(length: int, query: Array, value: Array) -> bool:
    from .splash_attention import takes  # Pallas, which a TPU alone needs

    return takes(length, query.shape[-1], value.shape[-1])


def _fused(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    sinks: Array | None,
    *,
    cudnn: bool,
    shape: Shape,
) -> Array:
    """Attend on one device by a fused kernel, whose gradient saves its own results under the name `NAME`."""
    if cudnn:
        return cudnn_attention(query, key, value, bias, shape.window, sinks=sinks)
    from .splash_attention import splash_attention

    return splash_attention(query, key, value, shape.cap, NAME)
