"""Cross entropy from the last hidden states, without the logits of the whole batch.

Logits are made a chunk of the sequence at a time, in the forward pass and again in the backward
pass; what is kept between the two is the hidden states and each position's log-sum-exp. The
gradient of the head is summed over chunks in float32 where it arises and crosses the network once.

Written by hand for each device (`shard_map`): the partitioner, left to itself, reduces that
gradient in every chunk, or gathers the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ..sharding import batch_axes
from ._base import Context

Saved = tuple[Array, Array, Array, Array]


def mean_cross_entropy(
    hidden: Float[Array, "batch sequence embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, "batch sequence"],
    context: Context,
    most_positions: int,
) -> Float[Array, ""]:
    """Mean of -log softmax(hidden . head)[target] over all positions, in nats, float32.

    Args:
        head: gathered over `fsdp`; its vocabulary may be split over `tensor`.
        most_positions: of the sequence, whose logits may exist at once; divides it, or exceeds it.
    """
    chunk = min(most_positions, hidden.shape[1])
    return _summed(context, chunk, hidden, head, context.pin(targets, "batch", "sequence")) / targets.size


def _axes(context: Context) -> tuple[tuple[str, ...], str | None]:
    """The axes that split the batch, and the one that splits the vocabulary, of more than one device."""
    return batch_axes(context.mesh), "tensor" if context.mesh.shape.get("tensor", 1) > 1 else None


def _on_each_device(local: Any, context: Context, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
    if context.mesh.size == 1:
        return local
    return jax.shard_map(local, mesh=context.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _at(x: Array, index: Array, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis=1)


def _logits(x: Array, head: Array) -> Array:
    return jnp.einsum("bse,ve->bsv", x, head, preferred_element_type=jnp.float32)


def _is_target(logits: Array, targets: Array, vocab_axis: str | None) -> Array:
    first = jax.lax.axis_index(vocab_axis) * logits.shape[-1] if vocab_axis else 0
    return (first + jnp.arange(logits.shape[-1]))[None, None, :] == targets[:, :, None]


def _forward(context: Context, chunk: int, hidden: Array, head: Array, targets: Array) -> tuple[Array, Saved]:
    batch, vocab = _axes(context)

    def local(hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
        def one(total: Array, index: Array) -> tuple[Array, Array]:
            logits = _logits(_at(hidden, index, chunk), head)
            chosen = jnp.where(_is_target(logits, _at(targets, index, chunk), vocab), logits, 0.0).sum(axis=-1)
            peak = logits.max(axis=-1)
            peak = jax.lax.pmax(peak, vocab) if vocab else peak
            mass = jnp.exp(logits - peak[:, :, None]).sum(axis=-1)
            mass, chosen = jax.lax.psum((mass, chosen), vocab) if vocab else (mass, chosen)
            log_sum_exp = peak + jnp.log(mass)
            return total + jnp.sum(log_sum_exp - chosen), log_sum_exp

        total, chunks = jax.lax.scan(one, jnp.float32(0), jnp.arange(hidden.shape[1] // chunk))
        log_sum_exp = jnp.moveaxis(chunks, 0, 1).reshape(targets.shape)
        return jax.lax.psum(total, batch) if batch else total, log_sum_exp

    rows = PartitionSpec(batch or None)
    each = _on_each_device(local, context, (rows, PartitionSpec(vocab), rows), (PartitionSpec(), rows))
    with jax.named_scope("loss"):
        total, log_sum_exp = each(hidden, head, targets)
    return total, (hidden, head, targets, log_sum_exp)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(context: Context, chunk: int, hidden: Array, head: Array, targets: Array) -> Array:
    return _forward(context, chunk, hidden, head, targets)[0]


def _backward(context: Context, chunk: int, saved: Saved, gradient: Array) -> tuple[Array, Array, None]:
    batch, vocab = _axes(context)
    scattered = "fsdp" if "fsdp" in batch else None

    def local(hidden: Array, head: Array, targets: Array, log_sum_exp: Array, gradient: Array) -> tuple[Array, Array]:
        def one(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
            d_hidden, d_head = carry
            x, labels = _at(hidden, index, chunk), _at(targets, index, chunk)
            with jax.named_scope("rematted_computation"):  # the name JAX gives to what is computed again
                logits = _logits(x, head)
            weights = jnp.exp(logits - _at(log_sum_exp, index, chunk)[:, :, None])
            d_logits = ((weights - _is_target(logits, labels, vocab)) * gradient).astype(hidden.dtype)
            d_x = jnp.einsum("bsv,ve->bse", d_logits, head)
            d_x = jax.lax.psum(d_x, vocab) if vocab else d_x
            d_head += jnp.einsum("bsv,bse->ve", d_logits, x, preferred_element_type=jnp.float32)
            return (jax.lax.dynamic_update_slice_in_dim(d_hidden, d_x, index * chunk, axis=1), d_head), None

        zeros = (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
        (d_hidden, d_head), _ = jax.lax.scan(one, zeros, jnp.arange(hidden.shape[1] // chunk))
        d_head = d_head.astype(head.dtype)
        if scattered:
            d_head = jax.lax.psum_scatter(d_head, "fsdp", scatter_dimension=1, tiled=True)
        return d_hidden, jax.lax.psum(d_head, "data") if "data" in batch else d_head

    rows, table = PartitionSpec(batch or None), PartitionSpec(vocab)
    inputs = (rows, table, rows, rows, PartitionSpec())
    each = _on_each_device(local, context, inputs, (rows, PartitionSpec(vocab, scattered)))
    with jax.named_scope("loss"):
        d_hidden, d_head = each(*saved, gradient)
    return d_hidden, d_head, None


_summed.defvjp(_forward, _backward)
