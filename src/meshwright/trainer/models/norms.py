"""Normalise activations: RMSNorm and LayerNorm, computed in float32.

The gradient is written here, so that the backward pass keeps the input in its own format and two numbers for
each token, the mean and 1 / sigma. JAX's own gradient would keep arrays in float32 as large as the input, or
compute the statistics again. Sources: Ba et al. 2016 (https://arxiv.org/abs/1607.06450), Zhang and Sennrich
2019 (https://arxiv.org/abs/1910.07467).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

STATISTICS = "norm_statistics"  # rematerialisation policies that save products save these
Vector = Float[Array, " embed"]
Saved = tuple[Array, Vector, Vector | None, Array, Array]


def normalised(
    x: Float[Array, "*tokens embed"],
    scale: Vector,
    bias: Vector | None,
    centred: bool,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "*tokens embed"]:
    """Return (x - mean) / sigma x scale + bias over the last dimension, computed in float32.

    Args:
        x: the input, in any format.
        scale: in float32.
        bias: in float32; None for none.
        centred: whether the mean is subtracted (LayerNorm) or not (RMSNorm).
        epsilon: added to the variance.
        dtype: the format of the result.
    """
    return _normalised(x, scale, bias, centred, epsilon, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _normalised(
    x: Array, scale: Array, bias: Array | None, centred: bool, epsilon: float, dtype: jax.typing.DTypeLike
) -> Any:
    return _forward(x, scale, bias, centred, epsilon, dtype)[0]


def _forward(
    x: Array, scale: Array, bias: Array | None, centred: bool, epsilon: float, dtype: jax.typing.DTypeLike
) -> tuple[Array, Saved]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True) if centred else jnp.zeros((), jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True) + epsilon)
    mean, inverse = (checkpoint_name(each, STATISTICS) for each in (mean, inverse))
    y = (wide - mean) * inverse * _row(scale, x.ndim)
    y = y if bias is None else y + _row(bias, x.ndim)
    return y.astype(dtype), (x, scale, bias, mean, inverse)


def _backward(
    centred: bool, _: float, __: jax.typing.DTypeLike, saved: Saved, d_out: Array
) -> tuple[Array, Array, Array | None]:
    x, scale, bias, mean, inverse = saved
    tokens = tuple(range(x.ndim - 1))
    wide = d_out.astype(jnp.float32)
    y = (x.astype(jnp.float32) - mean) * inverse
    d_y = wide * _row(scale, x.ndim)
    d_x = d_y - y * jnp.mean(d_y * y, axis=-1, keepdims=True)
    d_x = d_x - jnp.mean(d_y, axis=-1, keepdims=True) if centred else d_x
    d_bias = None if bias is None else jnp.sum(wide, axis=tokens)
    return (d_x * inverse).astype(x.dtype), jnp.sum(wide * y, axis=tokens), d_bias


def _row(vector: Array, rank: int) -> Array:
    return vector.reshape((1,) * (rank - 1) + vector.shape)


_normalised.defvjp(_forward, _backward)
