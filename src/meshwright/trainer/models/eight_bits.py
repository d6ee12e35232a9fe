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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from meshwright.sharding import AnyMesh, activation_spec, gather, on_each_device

from ._base_model import Context
from .products import ProductDims

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
Quantised = tuple[Array, Array]
"""Values in eight bits, and their scale, a float32 scalar."""
FRACTION, EXPONENT = 0x007F_FFFF, 0xFF80_0000  # bits of a float32; a power of two has no bit of the first


def quantised(x: Array, dtype: jax.typing.DTypeLike, axis: str | None = None) -> Quantised:
    """Quantise `x` to eight bits; return it with its scale, which is 1 for a tensor of zeros.

    `axis`: the devices along this manual axis of a mesh hold parts of one tensor, and share its scale.
    A non-finite number makes the scale non-finite, and with it the whole product.
    """
    most = jnp.max(jnp.abs(x)).astype(jnp.float32)
    if axis is not None:
        most = jax.lax.pmax(most, axis)
    smallest = float(jnp.finfo(jnp.float32).tiny)  # devices take smaller numbers for zero
    exact = jnp.where(most == 0, 1.0, jnp.maximum(most / float(jnp.finfo(dtype).max), smallest))
    bits = jax.lax.bitcast_convert_type(exact, jnp.uint32)
    power = jax.lax.bitcast_convert_type((bits + FRACTION) & jnp.uint32(EXPONENT), jnp.float32)
    scale = jnp.where(jnp.isfinite(exact), power, exact)
    return (x * (1 / scale).astype(x.dtype)).astype(dtype), scale


def quantised_matrix(weight: Array) -> Quantised:
    """Quantise a matrix of weights, for the forward and the backward pass."""
    return quantised(weight, FORWARD)


class NarrowMatrix(NamedTuple):
    """A matrix in eight bits: its values, and their scale, a float32 scalar.

    `stand_in` is of zeros, and nothing reads it. Its gradient is that of the matrix, which eight bits could
    not hold, in the format of `stand_in`.
    """

    values: Array
    scale: Array
    stand_in: Array


def narrowed(weight: Array, dtype: jax.typing.DTypeLike) -> NarrowMatrix:
    """Quantise a matrix that is first rounded to `dtype`; its gradient has its own format."""

    @jax.custom_vjp
    def use(weight: Array) -> NarrowMatrix:
        return NarrowMatrix(*quantised_matrix(weight.astype(dtype)), jnp.zeros(weight.shape, weight.dtype))

    use.defvjp(lambda weight: (use(weight), None), lambda _, gradient: (gradient.stand_in,))
    return use(weight)


class Placement(NamedTuple):
    """Say how a product's operand and result lie on a mesh, by their PartitionSpecs.

    Each device then has a scale for its part of them. No device waits for the greatest magnitude of all, and
    a scale is at most as large as one for all would be.
    """

    mesh: AnyMesh
    operand: PartitionSpec
    result: PartitionSpec


class _Product(NamedTuple):
    """Hold the settings of a product.

    Without `at`, its placement, each tensor has one scale. The matrix's gradient is in `of_gradient`.
    """

    dims: ProductDims
    on_cpu: bool
    at: Placement | None
    of_gradient: Any

    def quantise(self, x: Array, dtype: jax.typing.DTypeLike, spec: PartitionSpec | None) -> Quantised:
        """Quantise an array; with a placement its scale is [1, ...] on each device."""
        if self.at is None:
            return quantised(x, dtype)

        def local(x: Array) -> Quantised:
            values, scale = quantised(x, dtype)
            return values, scale.reshape((1,) * x.ndim)

        return on_each_device(local, self.at.mesh, spec, (spec, spec))(x)

    def widened(self, x: Quantised, dtype: jax.typing.DTypeLike, spec: PartitionSpec | None) -> Array:
        """Return rounded numbers times their scale: in `dtype`, or in float32 on a CPU, which has no fp8."""
        wide = jnp.float32 if self.on_cpu else dtype

        def local(values: Array, scale: Array) -> Array:
            return values.astype(wide) * scale.reshape(()).astype(wide)

        if self.at is None or spec is None:
            return local(*x)
        return on_each_device(local, self.at.mesh, (spec, spec), spec)(*x)


def _dot(x: Array, y: Array, dims: Any, dtype: jax.typing.DTypeLike) -> Array:
    wide = jnp.promote_types(x.dtype, dtype)
    return jax.lax.dot_general(x, y, dims, preferred_element_type=wide).astype(dtype)


def fp8_product(
    x: Array,
    weight: Array | NarrowMatrix,
    num_contracted: int,
    on_cpu: bool = False,
    num_batch: int = 0,
    at: Placement | None = None,
) -> Array:
    """Contract the last `num_contracted` dims of `x` with the first of `weight`, in eight bits.

    Args:
        x: its format is also that of the result and of its gradient.
        weight: of one matrix, or of as many as `x` has parts. It is rounded to the format of `x` first; its
            gradient has its own.
        num_contracted: dims that are summed over.
        on_cpu: multiply the rounded numbers in float32.
        num_batch: leading dims of both, 1 where each expert has its rows and its matrix. All share a scale.
        at: how `x` and the result lie on a mesh, for a scale on each device.
    """
    narrow = weight if isinstance(weight, NarrowMatrix) else narrowed(weight, x.dtype)
    how = _Product(ProductDims(num_contracted, num_batch), on_cpu, at, narrow.stand_in.dtype)
    return _multiplied(x, narrow, how)


def projected_in_eight_bits(x: Array, weight: Array, dims: tuple[str, ...], context: Context) -> Array:
    """Return x . W for `x` [batch, sequence, inputs] and a matrix at rest, whose `dims` name its dimensions.

    The matrix is quantised by the devices that hold its shards, so its eight bits cross the network.
    """
    num_inputs, mesh = x.ndim - 2, context.mesh
    matrix = gather(
        weight,
        mesh,
        context.dtype,
        *dims,
        zero1=context.zero1,
        wide_gradient=context.widens,
        narrowed=quantised_matrix,
    )
    operand, result = (
        activation_spec(("batch", "sequence", *names), mesh)
        for names in (dims[:num_inputs], dims[num_inputs:])
    )
    at = Placement(mesh, operand, result)
    return fp8_product(x, NarrowMatrix(*matrix), num_inputs, context.platform == "cpu", at=at)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiplied(x: Array, weight: NarrowMatrix, product: _Product) -> Array:
    return _forward(x, weight, product)[0]


def _forward(x: Array, weight: NarrowMatrix, product: _Product) -> tuple[Array, tuple[Quantised, Quantised]]:
    spec = None if product.at is None else product.at.operand
    narrow, matrix = product.quantise(x, FORWARD, spec), (weight.values, weight.scale)
    wide = product.widened(narrow, x.dtype, spec), product.widened(matrix, x.dtype, None)
    return _dot(*wide, product.dims.forward(x), x.dtype), (narrow, matrix)


def _backward(
    product: _Product, saved: tuple[Quantised, Quantised], gradient: Array
) -> tuple[Array, NarrowMatrix]:
    (x, matrix), dtype = saved, gradient.dtype
    specs = (None, None) if product.at is None else (product.at.operand, product.at.result)
    narrow = product.quantise(gradient, BACKWARD, specs[1])
    wide = product.widened(narrow, dtype, specs[1])
    dims = product.dims
    d_x = _dot(wide, product.widened(matrix, dtype, None), dims.of_x(gradient, matrix[0]), dtype)
    d_matrix = _dot(product.widened(x, dtype, specs[0]), wide, dims.of_matrix(x[0]), product.of_gradient)
    values, scale = (jnp.zeros_like(part) for part in matrix)  # the matrix's gradient is that of `stand_in`
    return d_x, NarrowMatrix(values, scale, d_matrix)


_multiplied.defvjp(_forward, _backward)
