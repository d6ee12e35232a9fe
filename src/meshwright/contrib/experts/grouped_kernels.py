"""Multiply tiles of rows with the matrices of their experts, as Pallas (Triton) kernels for NVIDIA's GPUs.

`grouped_products` says what is computed. A program of the grid computes one block of a tile's results, or of
an expert's matrix of gradients, by steps along the depth. Sums are in float32. A tile begins at any row: a
program reads rows of the next expert with its own, and does not store what it made of them.

The programs of a tile are neighbours in the grid, so that its rows stay in the cache (L2); where there are
many columns, the programs of a few tiles share a group of columns (the grid is swizzled by `GROUP`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

if TYPE_CHECKING:
    from .grouped_products import Axes, Grouping, Tiles

GROUP = 8  # tiles whose programs go over the columns together


class Block(NamedTuple):
    """The sizes of a program's block, and how it is compiled.

    `columns`: of the results. `depth`: of one step along what is summed; for gradients of matrices the rows
    of the results.
    """

    columns: int
    depth: int
    warps: int
    stages: int


class Blocks(NamedTuple):
    """The blocks of the two kernels."""

    by_matrix: Block
    of_matrices: Block


STEP = 64  # rows of one step of the sum for gradients of matrices
# The fastest of eleven and ten on an H200, over matrices of 2048 x 768 to 4096 x 14,336. Stages take 192
# and 144 KB of shared memory. The next fastest, in 96 KB each, lose 2 to 10 %.
LARGE = Blocks(Block(256, 64, 8, 4), Block(128, 256, 8, 3))
MIDDLE = Blocks(Block(128, 64, 8, 3), Block(128, 128, 4, 3))  # 164 KB, as on an A100
SMALL = Blocks(Block(128, 64, 4, 2), Block(128, 128, 4, 2))  # 100 KB
OF_CAPABILITY = {(8, 0): MIDDLE, (8, 7): MIDDLE, (9, 0): LARGE, (10, 0): LARGE, (10, 3): LARGE}
"""By compute capability. Others have 64 to 100 KB of shared memory for a block of threads.

Source: CUDA C++ programming guide, technical specifications per compute capability."""


def _fitted(block: Block, columns: int, depth: int) -> Block:
    """Return a block with the widest sides that divide those of the product."""
    sides = (math.gcd(block.columns, columns), math.gcd(block.depth, depth))
    return block._replace(columns=sides[0], depth=sides[1])


def _blocks(how: Grouping) -> Blocks:
    return OF_CAPABILITY.get(how.by_kernel or (0, 0), SMALL)


def _widths(dtype: Any) -> int:
    """Return how many numbers of 16 bits lie in one of `dtype`: a step of as many bytes has fewer numbers."""
    return max(1, jnp.dtype(dtype).itemsize // 2)


def _cost(executed: int, how: Grouping, inputs: int, outputs: int, x: Array) -> pl.CostEstimate:
    moved = executed * (inputs + outputs) + how.experts * inputs * outputs
    flops, moved_bytes = 2 * executed * inputs * outputs, moved * x.dtype.itemsize
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved_bytes)


def _needed(executed: int, how: Grouping) -> Any:
    """Return the scope that tells the counter of model FLOPs which share of the rows is no padding."""
    return jax.named_scope(f"needed_{min(how.rows, executed)}_of_{executed}")


def _own_rows(begin: Any, end: Any, size: int, num_rows: int) -> tuple[Any, Array]:
    """Return `size` rows of an array from `begin` on, and which of them [size, 1] lie before `end`.

    Where the array ends earlier, rows before `begin` are taken with them, which are not its own either.
    """
    at = jnp.minimum(begin, num_rows - size)
    number = at + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return pl.ds(at, size), (number >= begin) & (number < end)


def by_matrix(
    x: Array, matrices: Array, tiles: Tiles, how: Grouping, axes: Axes, dtype: jax.typing.DTypeLike
) -> Array:
    """Multiply each tile of `x` with its expert's matrix; rows beyond the last one give zeros.

    `x` and the matrices have one format. The sums are rounded to `dtype`.
    """
    depth, columns = matrices.shape[axes.summed], matrices.shape[axes.left]
    block = _blocks(how).by_matrix
    block = _fitted(block._replace(depth=block.depth // _widths(x.dtype)), columns, depth)
    num_tiles, executed = tiles.expert.size, how.executed(how.tile)
    call = pl.pallas_call(
        partial(_by_matrix, how=how, axes=axes, block=block, num_tiles=num_tiles),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], columns), dtype),
        grid=(num_tiles * (columns // block.columns),),
        cost_estimate=_cost(executed, how, depth, columns, x),
        compiler_params=plgpu.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=how.interpret,
        name="experts_by_transpose" if axes.summed > axes.left else "experts_by_matrix",
    )
    with _needed(executed, how):
        return call(tiles.expert, tiles.begin, tiles.end, x, matrices)


def _by_matrix(
    expert_ref: Any, begin_ref: Any, end_ref: Any, x_ref: Any, matrix_ref: Any, out_ref: Any, *,
    how: Grouping, axes: Axes, block: Block, num_tiles: int,
) -> None:  # fmt: skip
    depth, columns = x_ref.shape[1], out_ref.shape[1]
    tile, column = _place(pl.program_id(0), num_tiles, columns // block.columns)
    rows, own = _own_rows(begin_ref[tile], end_ref[tile], how.tile, x_ref.shape[0])
    expert, width = expert_ref[tile], pl.ds(column * block.columns, block.columns)

    def store(block: Array) -> None:
        plgpu.store(out_ref.at[rows, width], block, mask=jnp.broadcast_to(own, block.shape))

    @pl.when(expert < how.experts)
    def multiply() -> None:
        def step(i: Array, total: Array) -> Array:
            inner = pl.ds(i * block.depth, block.depth)
            matrix = matrix_ref[_index(axes, expert, inner, width)]
            return total + _dot(x_ref[rows, inner], matrix, 1, int(axes.summed > axes.left))

        start = jnp.zeros((how.tile, block.columns), jnp.float32)
        total = jax.lax.fori_loop(0, depth // block.depth, step, start)
        store(total.astype(out_ref.dtype))

    @pl.when(expert == how.experts)
    def fill() -> None:
        store(jnp.zeros((how.tile, block.columns), out_ref.dtype))


def _index(axes: Axes, expert: Any, summed: Any, left: Any) -> tuple[Any, ...]:
    """Return the index of a block of one expert's matrix."""
    index: list[Any] = [expert] * 3
    index[axes.summed], index[axes.left] = summed, left
    return tuple(index)


def _dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _place(program: Array, num_tiles: int, num_columns: int) -> tuple[Array, Array]:
    """Return the tile and the block of columns of a program: those of `GROUP` tiles are neighbours."""
    group, inside = program // (GROUP * num_columns), program % (GROUP * num_columns)
    size = jnp.minimum(num_tiles - group * GROUP, GROUP)
    return group * GROUP + inside % size, inside // size


def of_matrices(
    x: Array, gradient: Array, tiles: Tiles, how: Grouping, axes: Axes, dtype: jax.typing.DTypeLike
) -> Array:
    """Return x^T gradient over the rows of each expert, in `dtype`.

    If one of them has eight bits, it is multiplied in the format of the other.
    """
    if axes.summed > axes.left:  # the transpose, of which the rows of the result are the first axis
        x, gradient, axes = gradient, x, axes.transposed
    inputs, outputs = x.shape[1], gradient.shape[1]
    block = _fitted(_blocks(how).of_matrices, outputs, inputs)
    sizes = _index(axes, how.experts, inputs, outputs)
    is_narrow = x.dtype.itemsize < gradient.dtype.itemsize
    wide = jnp.promote_types(*(jnp.bfloat16 if a.dtype.itemsize == 1 else a.dtype for a in (x, gradient)))
    step = min(STEP // _widths(wide), how.tile)
    executed = how.executed(step)
    call = pl.pallas_call(
        partial(_of_matrices, axes=axes, block=block, step=step, wide=wide, gradient_first=is_narrow),
        out_shape=jax.ShapeDtypeStruct(sizes, dtype),
        grid=(inputs // block.depth, outputs // block.columns, how.experts),
        cost_estimate=_cost(executed, how, inputs, outputs, x),
        compiler_params=plgpu.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=how.interpret,
        name="experts_of_matrices",
    )
    # The operand in whose format the kernel multiplies comes first: the ledger takes it for the kernel's.
    with _needed(executed, how):
        return call(tiles.first, tiles.last, *((gradient, x) if is_narrow else (x, gradient)))


def _of_matrices(
    first_ref: Any, last_ref: Any, x_ref: Any, gradient_ref: Any, out_ref: Any, *,
    axes: Axes, block: Block, step: int, wide: Any, gradient_first: bool,
) -> None:  # fmt: skip
    if gradient_first:
        x_ref, gradient_ref = gradient_ref, x_ref
    row, column, expert = (pl.program_id(axis) for axis in range(3))
    inputs, outputs = pl.ds(row * block.depth, block.depth), pl.ds(column * block.columns, block.columns)
    first, last = first_ref[expert], last_ref[expert]

    def add(i: Array, total: Array) -> Array:
        rows, own = _own_rows(first + i * step, last, step, x_ref.shape[0])

        def read(ref: Any, columns: Any) -> Array:  # zeros for the rows of the next expert
            mask = jnp.broadcast_to(own, (step, columns.size))
            return plgpu.load(ref.at[rows, columns], mask=mask, other=0.0).astype(wide)

        return total + _dot(read(x_ref, inputs), read(gradient_ref, outputs), 0, 0)

    start = jnp.zeros((block.depth, block.columns), jnp.float32)
    total = jax.lax.fori_loop(0, (last - first + step - 1) // step, add, start)
    out_ref[_index(axes, expert, inputs, outputs)] = total.astype(out_ref.dtype)
