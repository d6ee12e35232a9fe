"""Multiply matrices in eight bits (fp8), with gradients: E4M3 forward, E5M2 for gradients.

A tensor is divided by its scale and rounded to the format (Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433). The scale is (the tensor's largest magnitude / the format's largest
number), rounded up to a power of two, so that dividing and multiplying by it are exact. This is "current
scaling" (https://docs.nvidia.com/deeplearning/transformer-engine): no history is kept. The eight-bit tensors
are saved for the backward pass.

A product is written as one in 16 bits, of the rounded numbers times their scales. XLA replaces that on GPUs
by one call of cuBLAS on the eight-bit numbers, which sums in float32 and writes 16 bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
Quantised = tuple[Array, Array]
"""Values in eight bits, and their scale, a float32 scalar."""
FRACTION, EXPONENT = 0x007F_FFFF, 0xFF80_0000  # bits of a float32; a power of two has no bit of the first


def quantised(x: Array, dtype: jax.typing.DTypeLike) -> Quantised:
    """Quantise `x` to eight bits; return it with its scale, which is 1 for a tensor of zeros.

    A non-finite number makes the scale non-finite, and with it the whole product.
    """
    most = jnp.max(jnp.abs(x)).astype(jnp.float32)
    smallest = float(jnp.finfo(jnp.float32).tiny)  # devices take smaller numbers for zero
    exact = jnp.where(most == 0, 1.0, jnp.maximum(most / float(jnp.finfo(dtype).max), smallest))
    bits = jax.lax.bitcast_convert_type(exact, jnp.uint32)
    power = jax.lax.bitcast_convert_type((bits + FRACTION) & jnp.uint32(EXPONENT), jnp.float32)
    scale = jnp.where(jnp.isfinite(exact), power, exact)
    return (x * (1 / scale).astype(x.dtype)).astype(dtype), scale


def _product(x: Quantised, y: Quantised, dims: Any, dtype: jax.typing.DTypeLike, on_cpu: bool) -> Array:
    (x8, x_scale), (y8, y_scale) = x, y
    if on_cpu:  # CPUs lack fp8 products: multiply the same numbers in float32
        x8, y8 = x8.astype(jnp.float32), y8.astype(jnp.float32)
        exact = jax.lax.dot_general(x8, y8, dims, preferred_element_type=jnp.float32)
        return (exact * (x_scale * y_scale)).astype(dtype)
    x16, y16 = (x8.astype(dtype) * x_scale.astype(dtype), y8.astype(dtype) * y_scale.astype(dtype))
    return jax.lax.dot_general(x16, y16, dims, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def fp8_product(
    x: Array, weight: Array, num_contracted: int, on_cpu: bool = False, num_batch: int = 0
) -> Array:
    """Contract the last `num_contracted` dims of `x` with the first of `weight`, in eight bits.

    Args:
        x: its format is also that of the result and of the gradients.
        weight: of one matrix, or of as many as `x` has parts.
        num_contracted: dims that are summed over.
        on_cpu: multiply the rounded numbers in float32.
        num_batch: leading dims of both, 1 where each expert has its rows and its matrix. All share a scale.
    """
    return _forward(x, weight, num_contracted, on_cpu, num_batch)[0]


def _forward(
    x: Array, weight: Array, num_contracted: int, on_cpu: bool, num_batch: int
) -> tuple[Array, tuple[Quantised, Quantised]]:
    saved, batch = (quantised(x, FORWARD), quantised(weight, FORWARD)), tuple(range(num_batch))
    summed = (
        tuple(range(x.ndim - num_contracted, x.ndim)),
        tuple(range(num_batch, num_batch + num_contracted)),
    )
    return _product(*saved, (summed, (batch, batch)), x.dtype, on_cpu), saved


def _backward(
    num_contracted: int,
    on_cpu: bool,
    num_batch: int,
    saved: tuple[Quantised, Quantised],
    gradient: Array,
) -> tuple[Array, Array]:
    x, weight = saved
    narrow, batch = quantised(gradient, BACKWARD), (tuple(range(num_batch)),) * 2
    num_rows = x[0].ndim - num_contracted
    first = num_batch + num_contracted
    outputs = tuple(range(num_rows, gradient.ndim)), tuple(range(first, weight[0].ndim))
    rows = (tuple(range(num_batch, num_rows)),) * 2
    return (
        _product(narrow, weight, (outputs, batch), gradient.dtype, on_cpu),
        _product(x, narrow, (rows, batch), gradient.dtype, on_cpu),
    )


fp8_product.defvjp(_forward, _backward)
