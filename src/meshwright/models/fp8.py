"""Products in eight bits: E4M3 forward, E5M2 for gradients, each tensor scaled by what it holds now.

A tensor is divided by (its greatest magnitude / the format's largest number), rounded to the format, and
multiplied; the product is summed in float32 and multiplied by both scales there. This is "current scaling"
(https://docs.nvidia.com/deeplearning/transformer-engine): no history is kept. The formats: Micikevicius et
al. 2022, https://arxiv.org/abs/2209.05433. Kept for the backward pass are the eight-bit tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
Quantised = tuple[Array, Array]  # values in eight bits, and their scale: float32, no dimensions


def quantised(x: Array, dtype: jax.typing.DTypeLike) -> Quantised:
    """`x` in eight bits, and what to multiply it by; a tensor of zeros has scale 1.

    A number that is not finite makes the scale so, and with it the whole product.
    """
    most = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.where(most == 0, 1.0, most / float(jnp.finfo(dtype).max))
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def _product(x: Quantised, y: Quantised, contracted: Any, dtype: jax.typing.DTypeLike, on_cpu: bool) -> Array:
    (x8, x_scale), (y8, y_scale) = x, y
    if on_cpu:  # has no such products: the same numbers, multiplied in float32
        x8, y8 = x8.astype(jnp.float32), y8.astype(jnp.float32)
    exact = jax.lax.dot_general(x8, y8, (contracted, ((), ())), preferred_element_type=jnp.float32)
    return (exact * (x_scale * y_scale)).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fp8_product(x: Array, weight: Array, num_contracted: int, on_cpu: bool = False) -> Array:
    """The last `num_contracted` dimensions of `x` against the first of `weight`, in eight bits.

    Args:
        x: in the format of the result and of the gradients.
        on_cpu: multiply the rounded numbers in float32.
    """
    return _forward(x, weight, num_contracted, on_cpu)[0]


def _forward(
    x: Array, weight: Array, num_contracted: int, on_cpu: bool
) -> tuple[Array, tuple[Quantised, Quantised]]:
    saved = quantised(x, FORWARD), quantised(weight, FORWARD)
    contracted = (tuple(range(x.ndim - num_contracted, x.ndim)), tuple(range(num_contracted)))
    return _product(*saved, contracted, x.dtype, on_cpu), saved


def _backward(
    num_contracted: int, on_cpu: bool, saved: tuple[Quantised, Quantised], gradient: Array
) -> tuple[Array, Array]:
    x, weight = saved
    narrow = quantised(gradient, BACKWARD)
    num_rows = x[0].ndim - num_contracted
    outputs = tuple(range(num_rows, gradient.ndim)), tuple(range(num_contracted, weight[0].ndim))
    rows = (tuple(range(num_rows)),) * 2
    return (
        _product(narrow, weight, outputs, gradient.dtype, on_cpu),
        _product(x, narrow, rows, gradient.dtype, on_cpu),
    )


fp8_product.defvjp(_forward, _backward)
