"""Cross entropy from the last hidden states, without the logits of the whole batch.

Logits are made a chunk of the sequence at a time, in the forward pass and again in the backward
pass; what is kept between the two is the hidden states. The gradient of the head is summed over
chunks in float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._base import Context


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
    return _summed(context, chunk, hidden, head, targets) / targets.size


def _logits(context: Context, hidden: Array, head: Array) -> Array:
    logits = jnp.einsum("bse,ve->bsv", hidden, head, preferred_element_type=jnp.float32)
    return context.pin(logits, "batch", "sequence", "vocab")


def _at(x: Array, index: Array | int, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis=1)


def _is_target(logits: Array, targets: Array) -> Array:
    return jnp.arange(logits.shape[-1])[None, None, :] == targets[:, :, None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(context: Context, chunk: int, hidden: Array, head: Array, targets: Array) -> Array:
    def one(total: Array, index: Array) -> tuple[Array, None]:
        logits = _logits(context, _at(hidden, index, chunk), head)
        labels = _at(targets, index, chunk)
        chosen = jnp.sum(jnp.where(_is_target(logits, labels), logits, 0.0), axis=-1)
        return total + jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen), None

    with jax.named_scope("loss"):
        return jax.lax.scan(one, jnp.float32(0), jnp.arange(hidden.shape[1] // chunk))[0]


def _forward(context: Context, chunk: int, hidden: Array, head: Array, targets: Array) -> tuple[Array, tuple]:
    return _summed(context, chunk, hidden, head, targets), (hidden, head, targets)


def _backward(context: Context, chunk: int, saved: tuple, gradient: Array) -> tuple[Array, Array, None]:
    hidden, head, targets = saved

    def one(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
        d_hidden, d_head = carry
        x, labels = _at(hidden, index, chunk), _at(targets, index, chunk)
        with jax.named_scope("rematted_computation"):  # the name JAX gives to what is computed again
            logits = _logits(context, x, head)
        d_logits = (jax.nn.softmax(logits, axis=-1) - _is_target(logits, labels)) * gradient
        d_logits = context.pin(d_logits.astype(hidden.dtype), "batch", "sequence", "vocab")
        d_x = context.pin(jnp.einsum("bsv,ve->bse", d_logits, head), "batch", "sequence", "embed")
        d_head += jnp.einsum("bsv,bse->ve", d_logits, x, preferred_element_type=jnp.float32)
        return (jax.lax.dynamic_update_slice_in_dim(d_hidden, d_x, index * chunk, axis=1), d_head), None

    with jax.named_scope("loss"):
        start = (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
        (d_hidden, d_head), _ = jax.lax.scan(one, start, jnp.arange(hidden.shape[1] // chunk))
    return d_hidden, d_head.astype(head.dtype), None


_summed.defvjp(_forward, _backward)
