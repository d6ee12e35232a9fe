"""Multiply rows that are grouped by expert with the matrix of their expert, without padding to a capacity.

The rows of an expert are multiplied in tiles, the last of them in part. So each tile meets one matrix, and a
product of all rows needs 2 x rows x inputs x outputs FLOPs and no row is dropped. `lax.ragged_dot` has the
same result, but XLA multiplies every row with every matrix on GPUs.

On NVIDIA GPUs since Ampere these are kernels of our own, in Pallas (Triton). The rows of an expert follow
those of the one before it (`packed`): a tile begins at any row, and stores those of its rows that belong to
its expert. Tiles beyond the last row are skipped. Elsewhere, and where a width has no factor of 16, a loop
over all tiles computes the same. There each expert begins at a tile, and rows that fill nothing are zeros.

Three products are needed, where E is a tile's expert:
    forward            y[tile]  = x[tile] W[E]
    gradient of rows   dx[tile] = dy[tile] W[E]^T
    of a matrix        dW[E]    = sum over the tiles of E of x[tile]^T dy[tile]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from meshwright.hardware import KERNEL_CAPABILITY, KERNEL_WIDTH
from meshwright.trainer.models.eight_bits import FORWARD, NarrowMatrix, Quantised, quantised

from ._dispatch_sizes import TILE_ROWS

LEAST_ROWS = 16  # of a tile: a GPU's matrix unit takes no fewer


class Tiles(NamedTuple):
    """Say where the rows of each expert lie, and which rows and expert each tile has.

    `expert` [tiles]: the expert of each tile; the number of experts for the tiles beyond the last row.
    `begin`, `end` [tiles]: the first row of each tile, and the row after its last one.
    `first`, `last` [experts]: the first row of each expert, and the row after its last one.
    """

    expert: Int[Array, " tiles"]
    begin: Int[Array, " tiles"]
    end: Int[Array, " tiles"]
    first: Int[Array, " experts"]
    last: Int[Array, " experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The sizes of a grouped product that are known before the run.

    `tile`: rows of a tile. `rows`: rows that the products need if the load is even. `by_kernel`: the compute
    capability of the NVIDIA GPU for which they run as kernels; None: they run as a loop. `packed`: no row
    lies between those of two experts, which kernels alone can multiply. `interpret`: run the kernels'
    programs on any device, slowly.
    """

    tile: int
    rows: int
    experts: int
    by_kernel: tuple[int, int] | None
    packed: bool = False
    interpret: bool = False

    def executed(self, step: int) -> int:
        """Return the rows that a kernel multiplies: each expert's in steps, the last of them half full."""
        return self.rows + self.experts * step // 2

    def num_tiles(self, most: int) -> int:
        """Return how many tiles hold `most` rows, and those beyond the last row up to `most`."""
        return tiles_for(most, self.experts, self.tile) + self.packed

    def num_slots(self, most: int) -> int:
        """Return how many rows an array has that holds `most` rows, however they are spread."""
        return max(most, self.tile) if self.packed else self.num_tiles(most) * self.tile


def tiles_for(rows: int, experts: int, tile: int) -> int:
    """Return how many tiles hold `rows` rows, however they are spread over `experts` experts.

    >>> tiles_for(10, 3, 4)  # one expert has 10 - 2, in two tiles, and two have one each
    4
    """
    used = min(rows, experts)  # experts with a row; each may leave all but one row of its last tile empty
    return (rows - used) // tile + used if rows else 1


def tile_rows(rows: int, experts: int) -> int:
    """Return how many rows a tile has: a power of two near the rows of an expert if the load is even.

    >>> tile_rows(32_768, 128), tile_rows(40, 8)
    (128, 16)
    """
    fair, size = rows / experts, LEAST_ROWS
    while size < min(fair, TILE_ROWS):
        size *= 2
    return size


def tiles_of(counts: Int[Array, " experts"], most: int, how: Grouping) -> Tiles:
    """Place the rows of each expert and its tiles, in the order of the experts.

    Args:
        counts: the rows of each expert.
        most: the most rows that there may be. The array that holds them has `how.num_slots(most)`.
        how: the sizes.

    >>> how = Grouping(tile=2, rows=3, experts=2, by_kernel=(9, 0), packed=True)
    >>> tiles = tiles_of(jnp.array([1, 2]), 3, how)
    >>> tiles.first.tolist(), tiles.last.tolist(), tiles.begin.tolist()
    ([0, 1], [1, 3], [0, 1, 3])
    """
    start = jnp.cumulative_sum((counts + how.tile - 1) // how.tile, include_initial=True)
    edges = jnp.cumulative_sum(counts, include_initial=True) if how.packed else start * how.tile
    number = jnp.arange(how.num_tiles(most), dtype=counts.dtype)
    expert = (start[1:][None] <= number[:, None]).astype(jnp.int32).sum(axis=1)
    begin = edges[expert] + (number - start[expert]) * how.tile
    after = jnp.append(edges[1:], how.num_slots(most))
    end = jnp.minimum(begin + how.tile, after[expert])
    return Tiles(*(a.astype(jnp.int32) for a in (expert, begin, end, edges[:-1], edges[:-1] + counts)))


class Axes(NamedTuple):
    """Say which axis of an array of matrices counts the experts, and which a product sums over."""

    experts: int = 0
    summed: int = 1

    @property
    def left(self) -> int:
        """Return the axis of the product's results."""
        return 3 - self.experts - self.summed

    @property
    def transposed(self) -> Axes:
        """Return the axes for the product with the transposes of the matrices."""
        return Axes(self.experts, self.left)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_product(x: Array, matrices: Array, tiles: Tiles, how: Grouping, axes: Axes) -> Array:
    """Multiply each tile of `x` [rows, inputs] with the matrix of its expert, in the format of `x`.

    Args:
        x: the rows; those that fill nothing are zeros.
        matrices: of three axes. They are rounded to the format of `x`. Their gradient has their own format.
        tiles: of rows.
        how: the sizes, and what computes.
        axes: of the matrices.

    >>> import jax.numpy as jnp
    >>> how = Grouping(tile=2, rows=3, experts=2, by_kernel=None)
    >>> tiles = tiles_of(jnp.array([1, 2]), 3, how)
    >>> x, matrices = jnp.array([[1.0], [0.0], [2.0], [3.0]]), jnp.array([[[10.0]], [[100.0]]])
    >>> grouped_product(x, matrices, tiles, how, Axes())[:, 0].tolist()
    [10.0, 0.0, 200.0, 300.0]
    """
    return _forward(x, matrices, tiles, how, axes)[0]


def _forward(
    x: Array, matrices: Array, tiles: Tiles, how: Grouping, axes: Axes
) -> tuple[Array, tuple[Any, ...]]:
    return by_matrix(x, matrices.astype(x.dtype), tiles, how, axes, x.dtype), (x, matrices, tiles)


def _backward(
    how: Grouping, axes: Axes, saved: tuple[Any, ...], gradient: Array
) -> tuple[Array, Array, None]:
    x, matrices, tiles = saved
    d_x = by_matrix(gradient, matrices.astype(x.dtype), tiles, how, axes.transposed, x.dtype)
    return d_x, of_matrices(x, gradient, tiles, how, axes, matrices.dtype), None


grouped_product.defvjp(_forward, _backward)


def by_matrix(
    x: Array, matrices: Array, tiles: Tiles, how: Grouping, axes: Axes, dtype: jax.typing.DTypeLike
) -> Array:
    """Multiply each tile of `x` with its expert's matrix, in their format, and round the sums to `dtype`.

    Tiles beyond the last row give zeros.
    """
    depth, columns = matrices.shape[axes.summed], matrices.shape[axes.left]
    if how.by_kernel is not None:
        return _kernels().by_matrix(x, matrices, tiles, how, axes, dtype)
    rows, stacked = x.reshape(-1, how.tile, depth), matrices.transpose(axes.experts, axes.summed, axes.left)

    def one(_: None, tile: tuple[Array, Array]) -> tuple[None, Array]:
        x, expert = tile
        expert = jnp.minimum(expert, how.experts - 1)
        return None, (x @ jax.lax.dynamic_index_in_dim(stacked, expert, keepdims=False)).astype(dtype)

    _, y = jax.lax.scan(one, None, (rows, tiles.expert))
    return y.reshape(-1, columns)


def of_matrices(
    x: Array, gradient: Array, tiles: Tiles, how: Grouping, axes: Axes, dtype: jax.typing.DTypeLike
) -> Array:
    """Return x[tile]^T gradient[tile], summed over the tiles of each expert, in `dtype`.

    An expert without rows gets zeros. The result has the axes of the matrices.
    """
    inputs, outputs = x.shape[1], gradient.shape[1]
    if how.by_kernel is not None:
        return _kernels().of_matrices(x, gradient, tiles, how, axes, dtype)
    rows, gradients = x.reshape(-1, how.tile, inputs), gradient.reshape(-1, how.tile, outputs)
    wide = jnp.promote_types(*(jnp.float32 if a.dtype.itemsize == 1 else a.dtype for a in (x, gradient)))

    def add(total: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x, gradient, expert = tile
        x, gradient = x.astype(wide), gradient.astype(wide)
        each = jax.lax.dot_general(x, gradient, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype)
        place = jnp.minimum(expert, how.experts - 1)  # tiles beyond the last row are zeros
        before = jax.lax.dynamic_index_in_dim(total, place, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, before + each, place, 0), None

    start = jnp.zeros((how.experts, inputs, outputs), jnp.float32)
    total, _ = jax.lax.scan(add, start, (rows, gradients, tiles.expert))
    return jnp.moveaxis(total, (0, 1, 2), (axes.experts, axes.summed, axes.left)).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_fp8_product(x: Array, matrices: NarrowMatrix, tiles: Tiles, how: Grouping, axes: Axes) -> Array:
    """Multiply as `grouped_product` does, in eight bits: the rows, the matrices and the gradient of rows.

    All are rounded to E4M3, with one scale for the rows and one for the matrices. The gradient of the
    matrices is of the rounded rows, and of the gradient in its own format, in which it is multiplied.
    """
    return _fp8_forward(x, matrices, tiles, how, axes)[0]


def _fp8_forward(
    x: Array, matrices: NarrowMatrix, tiles: Tiles, how: Grouping, axes: Axes
) -> tuple[Array, tuple[Any, ...]]:
    narrow = quantised(x, FORWARD)
    return _in_eight_bits(narrow, matrices, tiles, how, axes, x.dtype), (narrow, matrices, tiles)


def _fp8_backward(
    how: Grouping, axes: Axes, saved: tuple[Any, ...], gradient: Array
) -> tuple[Array, NarrowMatrix, None]:
    (values, scale), matrices, tiles = saved
    narrow, dtype = quantised(gradient, FORWARD), matrices.stand_in.dtype
    d_x = _in_eight_bits(narrow, matrices, tiles, how, axes.transposed, gradient.dtype)
    d_matrices = of_matrices(values, gradient, tiles, how, axes, dtype) * scale.astype(dtype)
    unused = jnp.zeros_like(matrices.values), jnp.zeros_like(matrices.scale)
    return d_x, NarrowMatrix(*unused, d_matrices), None


grouped_fp8_product.defvjp(_fp8_forward, _fp8_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows_of_bias(bias: Array, tiles: Tiles, tile: int) -> Array:
    """Return for each row the bias [experts, outputs] of its expert, which begins at a tile of `tile` rows.

    The gradient is summed over the rows of each tile, and over tiles by a product with zeros and ones: a GPU
    would choose the order in which a scatter adds them.
    """
    each = jnp.take(bias, tiles.expert, axis=0, mode="clip")
    return jnp.repeat(each, tile, axis=0, total_repeat_length=each.shape[0] * tile)


def _of_bias(tile: int, saved: tuple[Array, Tiles], gradient: Array) -> tuple[Array, None]:
    bias, tiles = saved
    of_tiles = gradient.reshape(-1, tile, gradient.shape[1]).sum(axis=1)
    is_of = (jnp.arange(bias.shape[0])[:, None] == tiles.expert[None]).astype(of_tiles.dtype)
    with jax.named_scope("needed_0_of_1"):  # a sum needs no product
        gradient = jnp.matmul(is_of, of_tiles, precision=jax.lax.Precision.HIGHEST)
    return gradient.astype(bias.dtype), None


rows_of_bias.defvjp(lambda bias, tiles, tile: (rows_of_bias(bias, tiles, tile), (bias, tiles)), _of_bias)


def _in_eight_bits(
    x: Quantised, matrices: NarrowMatrix, tiles: Tiles, how: Grouping, axes: Axes, dtype: Any
) -> Array:
    (x_values, x_scale), values = x, matrices.values
    if how.by_kernel is None:  # a loop's products in eight bits would be rounded to eight bits
        x_values, values = x_values.astype(jnp.float32), values.astype(jnp.float32)
    y = by_matrix(x_values, values, tiles, how, axes, jnp.float32 if how.by_kernel is None else dtype)
    # Scales are powers of two, so that a product with them is exact.
    return (y * (x_scale * matrices.scale).astype(y.dtype)).astype(dtype)


def _kernels() -> Any:
    from . import grouped_kernels  # Pallas, which only a GPU needs

    return grouped_kernels


def grouping_for(
    rows: int, experts: int, sides: tuple[int, int], platform: str, capability: tuple[int, int],
    *, biased: bool = False,
) -> Grouping:  # fmt: skip
    """Return how to multiply `rows` rows of `experts` experts with matrices of these sides on a platform.

    On NVIDIA's GPUs since Ampere kernels do, if both sides have a factor of `KERNEL_WIDTH`. The rows of
    experts with biases begin at tiles, since a bias is added to whole tiles.
    """
    is_taken = capability >= KERNEL_CAPABILITY and all(side % KERNEL_WIDTH == 0 for side in sides)
    takes_kernels = platform == "cuda" and is_taken
    by_kernel = capability if takes_kernels else None
    return Grouping(
        tile=tile_rows(rows, experts),
        rows=rows,
        experts=experts,
        by_kernel=by_kernel,
        packed=takes_kernels and not biased,
    )
