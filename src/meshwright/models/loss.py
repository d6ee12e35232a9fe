"""Compute the cross entropy from the last hidden states, without holding the logits of the whole batch.

Logits are computed for one chunk of the sequence at a time. If the loss is differentiated, the forward pass
also computes each chunk's gradients, so that no matmul runs twice. It saves these gradients in the compute
format, and the backward pass only scales them. Each device sums the gradient of the head over its chunks in
float32. The sum crosses the network once.

The code runs per device (`shard_map`): the automatic partitioner would reduce the gradient of the head in
every chunk, or gather the vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ..sharding import activation_spec, axis_size, mean_over_manual, on_each_device, token_axes
from ._base import Context

Saved = tuple[Array, Array]  # d_hidden, d_head: gradients of the summed loss, not of the mean
LEFT_OUT = -1  # marks a position that the loss leaves out
BACKWARD = "transpose(loss)"  # JAX's name for backward work; here it runs in the forward pass


def mean_cross_entropy(
    hidden: Float[Array, "batch sequence embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, "batch sequence"],
    context: Context,
    most_positions: int,
    *,
    gaps: bool = False,
    whole: Int[Array, "batch all_of_sequence"] | None = None,
) -> Float[Array, ""]:
    """Return the mean of -log softmax(hidden . head)[target] over the counted positions, in nats, float32.

    Args:
        head: gathered over `fsdp`; its vocabulary may be sharded over `tensor`.
        most_positions: the most positions whose logits may exist at once on a device. It must divide the
            length of the device's part of the sequence, or exceed it.
        gaps: targets may be `LEFT_OUT`. Such positions do not count; if none counts, the loss is 0.
        whole: all targets of the batch, if `targets` are only some of them. The sum is then divided by the
            number of all counted targets.
    """
    held = hidden.shape[1] // axis_size(context.mesh, "context")
    chunk = min(most_positions, held)
    assert held % chunk == 0, f"chunks of {chunk} would leave out some of {held} positions"
    targets = context.pin(targets, "batch", "sequence")
    total: Array = _summed(context, (chunk, gaps), hidden, head, targets)  # type: ignore[assignment]
    whole = targets if whole is None else whole
    if not gaps:
        return total / whole.size
    # If this runs per replica, a mean over replicas follows, so all must divide by the same count.
    counted = mean_over_manual(jnp.sum(whole != LEFT_OUT).astype(jnp.float32), context.mesh)
    return total / jnp.where(counted > 0, counted, 1.0)


def _axes(context: Context) -> tuple[tuple[str, ...], str | None]:
    """Return the axes of size above 1 that shard the tokens, and the one of the vocabulary."""
    return token_axes(context.mesh), "tensor" if axis_size(context.mesh, "tensor") > 1 else None


def _at(x: Array, index: Array, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis=1)


def _logits(x: Array, head: Array) -> Array:
    return jnp.einsum("bse,ve->bsv", x, head, preferred_element_type=jnp.float32)


def _is_target(logits: Array, targets: Array, vocab_axis: str | None) -> Array:
    first = jax.lax.axis_index(vocab_axis) * logits.shape[-1] if vocab_axis else 0
    return (first + jnp.arange(logits.shape[-1]))[None, None, :] == targets[:, :, None]


def _chunk(
    x: Array, head: Array, targets: Array, vocab: str | None, gaps: bool
) -> tuple[Array, Array, Array, Array]:
    """Return the summed loss of one chunk, its logits, their log-sum-exp, and a mask of the targets."""
    logits = _logits(x, head)
    is_target = _is_target(logits, targets, vocab)
    chosen = jnp.where(is_target, logits, 0.0).sum(axis=-1)
    peak = logits.max(axis=-1)
    peak = jax.lax.pmax(peak, vocab) if vocab else peak
    mass = jnp.exp(logits - peak[:, :, None]).sum(axis=-1)
    mass, chosen = jax.lax.psum((mass, chosen), vocab) if vocab else (mass, chosen)
    log_sum_exp = peak + jnp.log(mass)
    losses = log_sum_exp - chosen
    if gaps:
        losses = jnp.where(targets != LEFT_OUT, losses, 0.0)
    return jnp.sum(losses), logits, log_sum_exp, is_target


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(context: Context, how: tuple[int, bool], hidden: Array, head: Array, targets: Array) -> Array:
    (chunk, gaps), (split, vocab) = how, _axes(context)

    def local(hidden: Array, head: Array, targets: Array) -> Array:
        def one(total: Array, index: Array) -> tuple[Array, None]:
            x, labels = _at(hidden, index, chunk), _at(targets, index, chunk)
            return total + _chunk(x, head, labels, vocab, gaps)[0], None

        total, _ = jax.lax.scan(one, jnp.float32(0), jnp.arange(hidden.shape[1] // chunk))
        return jax.lax.psum(total, split) if split else total

    rows = activation_spec(("batch", "sequence"), context.mesh)
    each = on_each_device(local, context.mesh, (rows, PartitionSpec(vocab), rows), PartitionSpec())
    with jax.named_scope("loss"):
        return each(hidden, head, targets)


def _forward(
    context: Context, how: tuple[int, bool], hidden: Array, head: Array, targets: Array
) -> tuple[Array, Saved]:
    (chunk, gaps), (split, vocab) = how, _axes(context)
    scattered = tuple(axis for axis in (("fsdp", "data") if context.zero1 else ("fsdp",)) if axis in split)
    others = tuple(axis for axis in split if axis not in scattered)

    def local(hidden: Array, head: Array, targets: Array) -> tuple[Array, Array, Array]:
        def one(carry: tuple[Array, Array, Array], index: Array) -> tuple[tuple[Array, Array, Array], None]:
            total, d_hidden, d_head = carry
            x, labels = _at(hidden, index, chunk), _at(targets, index, chunk)
            loss, logits, log_sum_exp, is_target = _chunk(x, head, labels, vocab, gaps)
            with jax.named_scope(BACKWARD):
                d_logits = (jnp.exp(logits - log_sum_exp[:, :, None]) - is_target).astype(hidden.dtype)
                if gaps:
                    d_logits = jnp.where((labels != LEFT_OUT)[:, :, None], d_logits, 0)
                d_x = jnp.einsum("bsv,ve->bse", d_logits, head)
                d_x = jax.lax.psum(d_x, vocab) if vocab else d_x
                d_head += jnp.einsum("bsv,bse->ve", d_logits, x, preferred_element_type=jnp.float32)
                d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_x, index * chunk, axis=1)
            return (total + loss, d_hidden, d_head), None

        zeros = (jnp.float32(0), jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
        (total, d_hidden, d_head), _ = jax.lax.scan(one, zeros, jnp.arange(hidden.shape[1] // chunk))
        with jax.named_scope(BACKWARD):
            if head.dtype != jnp.float16:  # float16 could overflow: this gradient is a sum over the batch
                d_head = d_head.astype(head.dtype)
            for axis in scattered:
                d_head = jax.lax.psum_scatter(d_head, axis, scatter_dimension=1, tiled=True)
            d_head = jax.lax.psum(d_head, others) if others else d_head
        return jax.lax.psum(total, split) if split else total, d_hidden, d_head

    rows = activation_spec(("batch", "sequence"), context.mesh)
    outputs = (PartitionSpec(), rows, PartitionSpec(vocab, scattered or None))
    each = on_each_device(local, context.mesh, (rows, PartitionSpec(vocab), rows), outputs)
    with jax.named_scope("loss"):
        total, d_hidden, d_head = each(hidden, head, targets)
    return total, (d_hidden, d_head)


def _backward(_: Context, __: tuple[int, bool], saved: Saved, gradient: Array) -> tuple[Array, Array, None]:
    # Scale in float32: 1 / targets.size in bfloat16 would put the same error, up to 0.4 %, on every gradient.
    dtype = saved[0].dtype
    d_hidden, d_head = ((x.astype(jnp.float32) * gradient).astype(dtype) for x in saved)
    return d_hidden, d_head, None


_summed.defvjp(_forward, _backward)
