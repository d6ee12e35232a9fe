"""Keep the moments of matrices in eight bits each, with a scale in float32 for each block of numbers.

A number is divided by the largest magnitude of its block. The quotient's code says in which of seven powers
of ten it lies, and where between 0.1 and 1 of that power: large numbers have many codes, small ones few. This
is dynamic blockwise quantisation (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861), as bitsandbytes
and torchao have it: 256 codes, in the order of their values, and blocks of 256 numbers. Codes of a running
mean of squares have no sign, and twice as many magnitudes.

A block lies along one side of a single layer's matrix, so that the codes have the parameter's shape and
sharding. bitsandbytes and torchao take 256 numbers in the order of memory. If no side is a multiple of 256,
blocks are the largest divisor of one below that. Matrices of fewer than 4096 numbers, norms and biases stay
in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from meshwright.sharding import axes_of, axis_size
from meshwright.trainer.models import Parameter
from meshwright.trainer.step import EightBits, MatrixDims, is_matrix, matrix_dims, merged_entry

LARGEST_BLOCK = 256
SMALLEST_BLOCK = 32  # below it a scale would take more than an eighth of the codes' bytes
LEAST_NUMBERS = 4096  # of a matrix, as `min_8bit_size` of bitsandbytes
DECADES = 7
TINIEST_SCALE = 1e-12  # of a block of zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The division of a moment into blocks: its matrices' dims, the side along which they lie, their size."""

    dims: MatrixDims
    flat_shape: tuple[int, ...]
    side: int  # an index of `flat_shape`
    size: int

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the scales: `flat_shape` with a number for each block along `side`."""
        shape, side = self.flat_shape, self.side
        return (*shape[:side], shape[side] // self.size, *shape[side + 1 :])

    def encoded(self, x: Array, *, signed: bool) -> EightBits:
        """Return a moment in eight bits: of each number the nearest code."""
        apart = self._apart(x)
        scales = jnp.maximum(jnp.max(jnp.abs(apart), axis=self.side + 1), TINIEST_SCALE)
        codes = codes_of(apart / jnp.expand_dims(scales, self.side + 1), signed=signed)
        return EightBits(codes=codes.reshape(x.shape), scales=scales)

    def decoded(self, kept: EightBits, *, signed: bool) -> Array:
        """Return a moment as float32 from its codes and scales."""
        values = self._apart(values_of(kept.codes, signed=signed))
        return (values * jnp.expand_dims(kept.scales, self.side + 1)).reshape(kept.codes.shape)

    def _apart(self, x: Array) -> Array:
        """Return an array with one dim more: the numbers of a block stand behind the blocks of their side."""
        shape, side = self.flat_shape, self.side
        return x.reshape(*shape[:side], shape[side] // self.size, self.size, *shape[side + 1 :])


def blocks_of(parameter: Parameter) -> Blocks | None:
    """Return the blocks of a parameter's moments, or None if they stay in float32.

    Of a matrix's two sides, that with the larger blocks has them; of equals that whose blocks eight devices
    can share, and then the one that is not `embed`, which `fsdp` splits.
    """
    if not is_matrix(parameter):
        return None
    dims = matrix_dims(parameter)
    flat = dims.flat_shape(parameter.shape)
    if flat[-1] * flat[-2] < LEAST_NUMBERS:
        return None

    def worth(side: int) -> tuple[int, bool, bool]:
        size, of = block_size(flat[side]), dims.sides[side]
        names = {parameter.dims[place] for place in of}
        return size, flat[side] // size % 8 == 0, "embed" not in names

    side = max((len(flat) - 1, len(flat) - 2), key=worth)
    size = block_size(flat[side])
    return None if size < SMALLEST_BLOCK else Blocks(dims=dims, flat_shape=flat, side=side, size=size)


def spec_of_scales(parameter: Parameter, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return the PartitionSpec of the scales of a parameter's moment: as its dims, where blocks divide."""
    blocks = blocks_of(parameter)
    assert blocks is not None, parameter
    padded = (*spec, *(None for _ in parameter.shape[len(spec) :]))
    entries = [merged_entry(side, PartitionSpec(*padded)) for side in blocks.dims.sides]
    axes = axes_of(entries[blocks.side])
    if blocks.scales_shape[blocks.side] % math.prod(axis_size(mesh, axis) for axis in axes):
        entries[blocks.side] = None
    return PartitionSpec(*entries)


def block_size(number: int) -> int:
    """Return the largest divisor of `number` that is at most 256.

    >>> block_size(4096), block_size(320), block_size(50257)
    (256, 160, 29)
    """
    return next(size for size in range(min(LARGEST_BLOCK, number), 0, -1) if number % size == 0)


def codes_of(x: Array, *, signed: bool) -> Array:
    """Return the codes of numbers from -1 (0 if not `signed`) to 1: of each the one whose value is nearest.

    Two powers of ten meet at 0.1 of the larger. The neighbours there have their midpoint 0.18 / n above it,
    where n is the number of values of the larger power.
    """
    size = jnp.abs(x)
    decade = jnp.clip(jnp.floor(jnp.log10(size) + DECADES), 0, DECADES - 1)
    count = jnp.exp2(decade if signed else decade + 1)
    within = size * _power_of_ten(DECADES - 1 - decade)
    place = jnp.clip(jnp.floor((within - 0.1) * (count / 0.9)), 0, count - 1)
    least = jnp.where(decade == 0, 0.05 + 0.225 / count, 0.1 + 0.18 / count)  # below zero's neighbour is zero
    is_one = size >= 1 - 0.225 / 2 ** (DECADES - 1 if signed else DECADES)
    first = count if signed else count - 1
    code = first + place - (within < least).astype(jnp.float32) + is_one.astype(jnp.float32)
    if signed:
        code = 127 + jnp.maximum(code * jnp.sign(x), -127)
    return code.astype(jnp.uint8)


def values_of(codes: Array, *, signed: bool) -> Array:
    """Return the numbers from -1 to 1 for which codes stand, as float32."""
    code = codes.astype(jnp.int32) - (127 if signed else 0)
    place = jnp.abs(code) + (0 if signed else 1)  # counted so that powers of two begin a decade
    bits = 31 - jax.lax.clz(place)
    count = jnp.exp2(bits.astype(jnp.float32))
    within = 0.1 + (place.astype(jnp.float32) - count + 0.5) * (0.9 / count)
    power = _power_of_ten((bits - (DECADES - 1 if signed else DECADES)).astype(jnp.float32))
    return jnp.sign(code).astype(jnp.float32) * jnp.minimum(power * within, 1.0)


def _power_of_ten(exponent: Array) -> Array:
    """Return 10 to the power of small whole numbers."""
    return jnp.exp2(exponent * math.log2(10))
