"""Multiply activations by matrices of weights, in the compute format.

Autodiff gives a gradient the format of what it is the gradient of. So a matrix whose gradient should be in
float32 is given in float32: `product` rounds it to the format of the activations before it multiplies, and
writes the gradient as it is summed. The sum over the tokens of all devices is then in float32 too.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from ..sharding import gather, num_shards
from ._base import Context
from .eight_bits import fp8_product
from .quantised import dequantised


class _Dims(NamedTuple):
    """Name the dimensions that a product sums over, and those that count its parts.

    Each method returns the dimension numbers of `lax.dot_general` for one of the three products.
    """

    num_contracted: int
    num_batch: int

    def forward(self, x: Array) -> Any:
        batch = tuple(range(self.num_batch))
        last = tuple(range(x.ndim - self.num_contracted, x.ndim))
        first = tuple(range(self.num_batch, self.num_batch + self.num_contracted))
        return (last, first), (batch, batch)

    def of_x(self, gradient: Array, matrix: Array) -> Any:
        batch = tuple(range(self.num_batch))
        num_outputs = matrix.ndim - self.num_batch - self.num_contracted
        outputs = tuple(range(gradient.ndim - num_outputs, gradient.ndim))
        return (outputs, tuple(range(matrix.ndim - num_outputs, matrix.ndim))), (batch, batch)

    def of_matrix(self, x: Array) -> Any:
        batch = tuple(range(self.num_batch))
        rows = tuple(range(self.num_batch, x.ndim - self.num_contracted))
        return (rows, rows), (batch, batch)


def product(x: Array, matrix: Array, num_contracted: int, num_batch: int = 0) -> Array:
    """Contract the last `num_contracted` dims of `x` with the first of `matrix`, in the format of `x`.

    Args:
        matrix: in the format of `x`, or in float32: it is then rounded, and its gradient is float32.
        num_batch: leading dims of both, 1 where each expert has its rows and its matrix.

    >>> import jax.numpy as jnp
    >>> x, matrix = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4))
    >>> product(x, matrix, 1).dtype, jax.grad(lambda m: product(x, m, 1).sum())(matrix).dtype
    (dtype(bfloat16), dtype('float32'))
    """
    dims = _Dims(num_contracted, num_batch)
    if matrix.dtype == x.dtype:
        return jax.lax.dot_general(x, matrix, dims.forward(x))
    return _rounding(x, matrix, dims)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounding(x: Array, matrix: Array, dims: _Dims) -> Array:
    return jax.lax.dot_general(x, matrix.astype(x.dtype), dims.forward(x))


def _forward(x: Array, matrix: Array, dims: _Dims) -> tuple[Array, tuple[Array, Array]]:
    # Written out, so that a policy of rematerialisation sees a product, and can save it.
    return jax.lax.dot_general(x, matrix.astype(x.dtype), dims.forward(x)), (x, matrix)


def _backward(dims: _Dims, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, matrix = saved
    d_x = jax.lax.dot_general(gradient, matrix.astype(x.dtype), dims.of_x(gradient, matrix))
    d_matrix = jax.lax.dot_general(x, gradient, dims.of_matrix(x), preferred_element_type=matrix.dtype)
    return d_x, d_matrix


_rounding.defvjp(_forward, _backward)


def projected(x: Array, weight: Array, context: Context) -> Array:
    """Return x . W for `x` [batch, sequence, inputs] and `weight` [inputs, outputs], each of several dims.

    On one device the tokens are flattened: on a CPU, gradients of three-dimensional operands take twice as
    long (benchmarks/train_cpu.py).
    """
    num_inputs, on_cpu = x.ndim - 2, context.platform == "cpu"
    if num_shards(context.mesh) == 1:
        flat = x.reshape(x.shape[0] * x.shape[1], -1)
        matrix = weight.reshape(flat.shape[1], -1)
        y = fp8_product(flat, matrix, 1, on_cpu) if context.fp8 else product(flat, matrix, 1)
        return y.reshape(*x.shape[:2], *weight.shape[num_inputs:])
    if context.fp8:
        return fp8_product(x, weight, num_inputs, on_cpu)
    return product(x, weight, num_inputs)


def projected_by_codes(
    x: Array, codes: Array, scales: Array, *, dims: tuple[str, ...], context: Context
) -> Array:
    """Return x . W for a matrix that is held in four bits."""
    codes, scales = (gather(part, context.mesh, part.dtype, *dims) for part in (codes, scales))
    return projected(x, dequantised(codes, scales, context.dtype), context)
