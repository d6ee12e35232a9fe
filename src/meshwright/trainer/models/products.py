"""Multiply arrays in the compute format, with gradients of matrices in float32 by choice.

Autodiff gives a gradient the format of what it is the gradient of. So a matrix whose gradient should be in
float32 is given in float32: `product` rounds it to the format of the activations before it multiplies, and
writes the gradient as it is summed. The sum over the tokens of all devices is then in float32 too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

ADAPTER = "_adapter"
"""Ends the name of an adapter, which lies beside its product's matrix."""
Project = Callable[[Array, str], Array]
"""Returns the product of an activation with the matrix of a name among a mixer's."""


def num_inputs_of(name: str) -> int:
    """Return how many dims of a product's matrix are inputs: two for attention's output."""
    return 2 if name == "output" else 1


class ProductDims(NamedTuple):
    """Name the dimensions of a product of activations and a matrix.

    The last `num_contracted` of the activations are summed over with the first of the matrix, after
    `num_batch` leading ones that both have: 1 where each expert has its rows and its matrix. Each method
    returns the dimension numbers of `lax.dot_general` for one product.
    """

    num_contracted: int
    num_batch: int

    def forward(self, x: Array) -> Any:
        """Return the dimension numbers of x @ W."""
        batch = tuple(range(self.num_batch))
        last = tuple(range(x.ndim - self.num_contracted, x.ndim))
        first = tuple(range(self.num_batch, self.num_batch + self.num_contracted))
        return (last, first), (batch, batch)

    def of_x(self, gradient: Array, matrix: Array) -> Any:
        """Return the dimension numbers of the product that gives the gradient of x."""
        batch = tuple(range(self.num_batch))
        num_outputs = matrix.ndim - self.num_batch - self.num_contracted
        outputs = tuple(range(gradient.ndim - num_outputs, gradient.ndim))
        return (outputs, tuple(range(matrix.ndim - num_outputs, matrix.ndim))), (batch, batch)

    def of_matrix(self, x: Array) -> Any:
        """Return the dimension numbers of the product that gives the gradient of W."""
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
    dims = ProductDims(num_contracted, num_batch)
    if matrix.dtype == x.dtype:
        return jax.lax.dot_general(x, matrix, dims.forward(x))
    return _rounding(x, matrix, dims)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounding(x: Array, matrix: Array, dims: ProductDims) -> Array:
    return _forward(x, matrix, dims)[0]


def _forward(x: Array, matrix: Array, dims: ProductDims) -> tuple[Array, tuple[Array, Array]]:
    # The rule of the forward pass calls no custom rule, so a policy of rematerialisation sees the product.
    return jax.lax.dot_general(x, matrix.astype(x.dtype), dims.forward(x)), (x, matrix)


def _backward(dims: ProductDims, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, matrix = saved
    d_x = jax.lax.dot_general(gradient, matrix.astype(x.dtype), dims.of_x(gradient, matrix))
    d_matrix = jax.lax.dot_general(x, gradient, dims.of_matrix(x), preferred_element_type=matrix.dtype)
    return d_x, d_matrix


_rounding.defvjp(_forward, _backward)
