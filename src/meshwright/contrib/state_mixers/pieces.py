"""Order what a sequence has on a device that shares it over `context`, for layers that read it in order.

The sequence has 2N equal pieces, and device i of N holds pieces i and 2N-1-i (`attention`). Here they are
rows of their own, [2 x batch, sequence, ...], the first pieces of all rows before the second ones. Everything
runs on each device; where one device holds the sequence, that is the one piece.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.trainer.models.attention_blocks import AXIS


def in_pieces(x: Any, size: int) -> Any:
    """Return arrays [batch, sequence, ...] of one of `size` devices with its pieces as rows."""
    if size == 1:
        return x
    return jax.tree.map(lambda each: jnp.concatenate(jnp.split(each, 2, axis=1)), x)


def from_pieces(x: Array, size: int) -> Array:
    """Return `x` with a row's two pieces one after the other, as a device holds them."""
    return x if size == 1 else jnp.concatenate(jnp.split(x, 2), axis=1)


def of_all_pieces(x: Array, size: int) -> Float[Array, "pieces batch ..."]:
    """Return what each piece of the sequence has, in order, from `x` of this device's pieces as rows.

    One message brings it.
    """
    if size == 1:
        return x[None]
    each = jax.lax.all_gather(x, AXIS)
    first, second = jnp.split(each, 2, axis=1)
    return jnp.concatenate([first, second[::-1]])


def of_own_pieces(x: Array, size: int) -> Array:
    """Return the rows of this device's pieces from `x` [pieces, batch, ...] of all."""
    if size == 1:
        return x[0]
    device = jax.lax.axis_index(AXIS)
    places = (device, 2 * size - 1 - device)
    return jnp.concatenate([jax.lax.dynamic_index_in_dim(x, place, 0, keepdims=False) for place in places])


def short_convolution(
    x: Float[Array, "batch sequence *channels"],
    weights: Float[Array, "*channels width"],
    places: Int[Array, "batch sequence"] | None,
    size: int,
) -> Float[Array, "batch sequence *channels"]:
    """Return in float32 the sums of each channel's last `width` numbers, its own too, times its weights.

    The last weight is that of the token itself. Before the first token there are zeros.

    Args:
        x: of this device's pieces as rows, in any format.
        weights: in float32.
        places: each token's place in its document; those before the document's first count as zeros.
        size: the devices that share the sequence; one message brings each piece the tokens before it.
    """
    width, length = weights.shape[-1], x.shape[1]
    before = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype)
    if size > 1 and width > 1:
        assert length >= width - 1, f"a piece of {length} tokens has no {width - 1} for the next one"
        ends = of_all_pieces(x[:, length - width + 1 :], size)
        before = of_own_pieces(jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), size)
    padded = jnp.concatenate([before, x], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(width):
        taken = jax.lax.slice_in_dim(padded, width - 1 - back, width - 1 - back + length, axis=1)
        taken = taken.astype(jnp.float32) * weights[None, None, ..., width - 1 - back]
        if places is not None and back:
            is_same = (places >= back).reshape(*places.shape, *(1,) * (x.ndim - 2))
            taken = jnp.where(is_same, taken, 0.0)
        total = total + taken
    return total
