"""Hold frozen matrices in four bits, as QLoRA does.

Each number is one of the sixteen values of NF4, the quantiles of a normal distribution scaled to [-1, 1],
times a scale of its block (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, section 3 and appendix E).
A block is 64 numbers side by side in a matrix's last dimension, or fewer where 64 do not divide that. Its
scale is its largest magnitude, in float32: 4.5 bits for a number in all. The paper quantises the scales once
more, to 4.127 bits; that is not done here.

A matrix `query` [..., n] is held as `query_codes` [..., n / 2], two numbers in a byte, the first in its high
bits, and `query_scales` [..., n / block]. Both are divided over the mesh as the matrix is. Each use of the
matrix computes its numbers again in the compute format, so that those of one product exist at a time.
Embeddings, the head, biases and norms keep their format, as the paper's do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from meshwright.config import GLOBAL_ATTENTION, NF4_BLOCK, RunConfig
from meshwright.sharding import gather
from meshwright.trainer.models import Context, Parameter, Tree, is_parameter
from meshwright.trainer.models.transformer_block import projected
from meshwright.trainer.step import FORMATS

from ._adapted_products import TARGETS

CODES, SCALES = "_codes", "_scales"
"""End the names of the two arrays that hold a matrix."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_PRODUCTS = frozenset(place for places in TARGETS.values() for place in places)  # by group and name
_BORDERS = tuple((low + high) / 2 for low, high in itertools.pairwise(NF4))


def frozen_declarations(config: RunConfig, declared: Tree) -> Tree:
    """Return the declarations of frozen parameters from those of the model's.

    With `base = "nf4"` matrices of the blocks' products are in four bits.
    """
    if config.lora.base != "nf4":
        return declared

    def both(name: str, matrix: Parameter) -> dict[str, Parameter]:
        *rest, last = matrix.shape
        return {
            f"{name}{CODES}": replace(matrix, shape=(*rest, last // 2)),
            f"{name}{SCALES}": replace(matrix, shape=(*rest, last // block_of(last)), wide=True),
        }

    return _with_products(declared, both)


def frozen_parameters(config: RunConfig, declared: Tree, drawn: Tree) -> Tree:
    """Return frozen parameters in their format, as `frozen_declarations` declares them.

    Args:
        config: of the run.
        declared: the model's declarations.
        drawn: their numbers, in float32.
    """
    base = config.lora.base
    dtype = jnp.float32 if base == "fp32" else FORMATS[config.precision]
    held = jax.tree.map(lambda p, x: x if p.wide else x.astype(dtype), declared, drawn, is_leaf=is_parameter)
    if base != "nf4":
        return held

    def both(name: str, matrix: Array) -> dict[str, Array]:
        codes, scales = to_codes(matrix, jnp)
        return {f"{name}{CODES}": codes, f"{name}{SCALES}": scales}

    return _with_products(held, both)


def block_of(size: int) -> int:
    """Return how many of the numbers of a last dimension share a scale.

    >>> block_of(4096), block_of(96)
    (64, 32)
    """
    return math.gcd(size, NF4_BLOCK)


def matrix_of(path: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the path of the matrix that an array at `path` holds, and `CODES`, `SCALES` or "".

    >>> matrix_of(("layers", "attention", "query_codes"))
    (('layers', 'attention', 'query'), '_codes')
    """
    for suffix in (CODES, SCALES):
        if path[-1].endswith(suffix):
            return (*path[:-1], path[-1].removesuffix(suffix)), suffix
    return path, ""


def quantised_part(read: Callable[[slice], np.ndarray], size: int, suffix: str, wanted: slice) -> np.ndarray:
    """Return a slice, in the last dimension, of the codes or the scales of a matrix.

    Args:
        read: returns a slice of the matrix in its last dimension; whole blocks are asked for.
        size: of the matrix's last dimension.
        suffix: `CODES` or `SCALES`.
        wanted: the slice.
    """
    block = block_of(size)
    each = 2 if suffix == CODES else block  # numbers
    first, end, _ = wanted.indices(size // each)
    low, high = first * each // block * block, -(-end * each // block) * block
    codes, scales = to_codes(read(slice(low, high)), block=block)
    return (codes if suffix == CODES else scales)[..., first - low // each : end - low // each]


def to_codes(matrix: Any, xp: Any = np, block: int | None = None) -> tuple[Any, Any]:
    """Return the codes and the scales of a matrix [..., n], by numpy or another module like it.

    `block` is that of the whole matrix, where this is a part.

    >>> codes, scales = to_codes(np.array([[0.0, 2.0, -2.0, 1.0] * 4], np.float32))
    >>> codes[0, :2], float(scales[0, 0])
    (array([127,  12], dtype=uint8), 2.0)
    """
    *rest, size = matrix.shape
    blocks = matrix.astype(np.float32).reshape(*rest, -1, block or block_of(size))
    scales = abs(blocks).max(axis=-1)
    shares = blocks / xp.where(scales == 0, np.float32(1), scales)[..., None]
    codes = xp.searchsorted(xp.asarray(_BORDERS, np.float32), shares).astype(np.uint8)
    pairs = codes.reshape(*rest, -1, 2)
    return pairs[..., 0] << 4 | pairs[..., 1], scales


def dequantised_array(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the matrix that codes and scales hold, in float32."""
    pairs = np.stack([codes >> 4, codes & 15], axis=-1)
    blocks = np.asarray(NF4, np.float32)[pairs].reshape(*scales.shape, -1)
    return (blocks * scales[..., None]).reshape(*codes.shape[:-1], -1)


def dequantised(
    codes: UInt8[Array, "*rest half"], scales: Float[Array, "*rest blocks"], dtype: jax.typing.DTypeLike
) -> Float[Array, "*rest size"]:
    """Return the matrix in `dtype`. It has no gradient: it is frozen."""

    @jax.custom_vjp
    def numbers(codes: Array, scales: Array) -> Array:
        pairs = jnp.stack([codes >> 4, codes & 15], axis=-1)
        blocks = jnp.take(jnp.asarray(NF4, jnp.float32), pairs.astype(jnp.int32), mode="clip")
        blocks = blocks.reshape(*scales.shape, -1) * scales[..., None]
        return blocks.reshape(*codes.shape[:-1], -1).astype(dtype)

    def backward(shape: tuple[int, ...], _: Array) -> tuple[np.ndarray, Array]:
        return np.zeros(shape, jax.dtypes.float0), jnp.zeros_like(scales)

    numbers.defvjp(lambda codes, scales: (numbers(codes, scales), codes.shape), backward)
    with jax.named_scope("dequantise"):
        return numbers(codes, scales)


def projected_by_codes(
    x: Array, held: Mapping[str, Array], name: str, dims: tuple[str, ...], context: Context
) -> Array:
    """Return x . W for a matrix that is held in four bits: it is computed, and again in the backward pass.

    Args:
        x: [batch, sequence, inputs].
        held: the group's parameters of one layer.
        name: of the matrix.
        dims: its dimensions' names.
        context: of the run.
    """
    parts = tuple(held[f"{name}{part}"] for part in (CODES, SCALES))
    return jax.checkpoint(partial(_projected_by_codes, dims=dims, context=context))(x, *parts)


def _projected_by_codes(
    x: Array, codes: Array, scales: Array, *, dims: tuple[str, ...], context: Context
) -> Array:
    codes, scales = (gather(part, context.mesh, part.dtype, *dims) for part in (codes, scales))
    return projected(x, dequantised(codes, scales, context.dtype), context)


def _with_products(tree: Tree, both: Callable[[str, Any], dict[str, Any]], group: str = "") -> Tree:
    """Return a tree in which each matrix of a block's products is two leaves, made by `both`."""
    if isinstance(tree, list):
        return [_with_products(each, both) for each in tree]
    if not isinstance(tree, dict):
        return tree
    made: dict[str, Any] = {}
    group = "attention" if group == GLOBAL_ATTENTION else group
    for name, below in tree.items():
        made |= both(name, below) if (group, name) in _PRODUCTS else {name: _with_products(below, both, name)}
    return made
