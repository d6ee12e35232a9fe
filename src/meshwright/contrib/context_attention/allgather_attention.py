"""Attend to the keys of a sequence over `context` after gathering them: few calls with many keys each.

As Llama 3's own training does (https://arxiv.org/abs/2407.21783, section 3.3.2). A kernel reaches its best
rate with many keys, and each of a ring's 2N calls has one piece of them. The price is memory: the keys and
values of whole windows, and their gradients in float32, for one layer at a time (`trainer.models.attention`).

The sequence has 2N equal pieces, and device i holds pieces i and 2N-1-i. Each piece attends causally to
itself. Of the others, the second attends to the first N on every device. There remain N - 1 pieces of keys:
i for the device's first piece, N-1-i for its second. The compiled program is one for all devices, so these
are cut into parts whose sizes do not depend on i: the larger half of what remains, of that again, and so on.
A part belongs to the first piece if that has as many left, otherwise to the second, which then has. So N = 16
takes calls of 16, 8, 4, 2 and 1 pieces of keys, and one causal call.

In layers with a window W, a piece of L queries takes the min(L + W - 1, all) keys that end with its own last
one, or the first ones where there are fewer. The queries stand somewhere among these, and a mask by
places, which is the same as one by positions, keeps each to its window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from meshwright.trainer.models import Tree
from meshwright.trainer.models.attention_blocks import AXIS, Gradients, Kernel, Part, PartResult, merged

EVEN = 128  # keys of a piece with a window are a multiple of this, as kernels like them


class _Share(NamedTuple):
    """A part of the keys, `size` pieces from `start`, and whether the first piece's queries attend to it."""

    size: int
    start: Int[Array, ""]
    is_first: Array


def part_sizes(num_pieces: int) -> list[int]:
    """Return sizes that sum to `num_pieces`, such that subsets of them sum to every smaller number.

    >>> part_sizes(15), part_sizes(5), part_sizes(0)
    ([8, 4, 2, 1], [3, 1, 1], [])
    """
    sizes = list[int]()
    while num_pieces:
        sizes.append(num_pieces - num_pieces // 2)
        num_pieces //= 2
    return sizes


def _shares(size: int) -> Iterator[_Share]:
    """Yield this device's parts of the keys beyond the first N pieces for its second piece of queries."""
    device = jax.lax.axis_index(AXIS)
    first, second = jnp.int32(0), jnp.int32(size)  # where each piece's next keys begin
    for num in part_sizes(size - 1):
        is_first = device - first >= num
        yield _Share(num, jnp.where(is_first, first, second), is_first)
        first, second = first + jnp.where(is_first, num, 0), second + jnp.where(is_first, 0, num)


def _gathered(key: Array, value: Array) -> Float[Array, "both_batch sequence kv_heads head_dim"]:
    """Return keys and values of all devices, stacked along the batch, in the order of the window."""
    return _in_order(jnp.concatenate([key, value]))


def _in_order(x: Array) -> Array:
    """Return `x` [batch, positions, ...] of all devices, in the order of the window."""
    each = jax.lax.all_gather(x, AXIS)
    half = each.shape[2] // 2
    ordered = jnp.concatenate([each[:, :, :half], each[::-1, :, half:]])
    return rearrange(ordered, "pieces b s ... -> b (pieces s) ...")


def _scattered(d_both: Array, size: int) -> Array:
    """Sum the gradients of `_gathered` over the devices; return those of this device's keys and values."""
    pieces = rearrange(d_both, "b (pieces s) k d -> pieces b s k d", pieces=2 * size)
    each = jnp.concatenate([pieces[:size], pieces[size:][::-1]], axis=2)
    return jax.lax.psum_scatter(each, AXIS, scatter_dimension=0)


def _in_pieces(x: Array) -> Array:
    """Return the device's two pieces of `x` [batch, sequence, ...] as rows of their own."""
    return rearrange(x, "b (two s) ... -> (b two) s ...", two=2)


def _by_piece(result: PartResult) -> list[PartResult]:
    """Return the results of the first and of the second piece, which are rows of their own."""
    out = rearrange(result.out, "(b two) s h d -> two b s h d", two=2)
    log_sum_exp = rearrange(result.log_sum_exp, "(b two) h s -> two b h s", two=2)
    return [PartResult(out[place], log_sum_exp[place]) for place in (0, 1)]


def _of_piece(result: PartResult, place: int) -> PartResult:
    """Return the part of a device's result that is of its first piece (0) or its second (1)."""
    return PartResult(
        jnp.split(result.out, 2, axis=1)[place], jnp.split(result.log_sum_exp, 2, axis=2)[place]
    )


def _either(condition: Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _part(query: Array, both: Array) -> Part:
    key, value = jnp.split(both, 2)
    return Part(query, key, value, None)


def _own(query: Array, key: Array, value: Array) -> Part:
    """Return the part in which each of the device's pieces attends to itself."""
    return Part(_in_pieces(query), _in_pieces(key), _in_pieces(value), None)


def gathered_forward(kernel: Kernel, size: int, query: Array, key: Array, value: Array) -> PartResult:
    """Attend with one of `size` devices' queries to the keys of all. Runs on each device."""
    both = _gathered(key, value)
    results = _by_piece(kernel.forward(_own(query, key, value), True))
    queries = jnp.split(query, 2, axis=1)
    length = queries[0].shape[1]
    of_all = kernel.forward(_part(queries[1], both[:, : size * length]), False)
    results[1] = merged(results[1], of_all)
    for share in _shares(size):
        keys = jax.lax.dynamic_slice_in_dim(both, share.start * length, share.size * length, axis=1)
        found = kernel.forward(_part(_either(share.is_first, *queries), keys), False)
        for place, is_mine in enumerate((share.is_first, ~share.is_first)):
            log_sum_exp = jnp.where(is_mine, found.log_sum_exp, -jnp.inf)
            results[place] = merged(results[place], found._replace(log_sum_exp=log_sum_exp))
    out = jnp.concatenate([each.out for each in results], axis=1).astype(query.dtype)
    return PartResult(out, jnp.concatenate([each.log_sum_exp for each in results], axis=2))


def gathered_backward(
    kernel: Kernel, size: int, query: Array, key: Array, value: Array, result: PartResult, d_out: Array
) -> Gradients:
    """Return the gradients of one device's queries, keys and values. Runs on each device."""
    both = _gathered(key, value)
    of_rows = rearrange(result.log_sum_exp, "b h (two s) -> (b two) h s", two=2)
    result_in_pieces = PartResult(_in_pieces(result.out), of_rows)
    d_own = kernel.backward(_own(query, key, value), True, result_in_pieces, _in_pieces(d_out))
    d_own = [rearrange(x, "(b two) s ... -> b (two s) ...", two=2) for x in d_own]
    queries, d_outs = jnp.split(query, 2, axis=1), jnp.split(d_out, 2, axis=1)
    pieces = [(queries[place], d_outs[place], _of_piece(result, place)) for place in (0, 1)]
    length = queries[0].shape[1]
    d_queries = jnp.split(d_own[0], 2, axis=1)

    def back(piece: tuple[Array, Array, PartResult], keys: Array) -> tuple[Array, Array]:
        query, d_out, result = piece
        d_query, *d_both = kernel.backward(_part(query, keys), False, result, d_out)
        return d_query, jnp.concatenate(d_both)

    more, d_first = back(pieces[1], both[:, : size * length])
    d_queries[1] += more
    d_both = jnp.concatenate([d_first, jnp.zeros_like(d_first)], axis=1)
    for share in _shares(size):
        start = share.start * length
        keys = jax.lax.dynamic_slice_in_dim(both, start, share.size * length, axis=1)
        more, d_keys = back(_either(share.is_first, *pieces), keys)
        for place, is_mine in enumerate((share.is_first, ~share.is_first)):
            d_queries[place] += jnp.where(is_mine, more, 0)
        before = jax.lax.dynamic_slice_in_dim(d_both, start, share.size * length, axis=1)
        d_both = jax.lax.dynamic_update_slice_in_dim(d_both, before + d_keys, start, axis=1)
    d_key, d_value = jnp.split(_scattered(d_both, size), 2)
    d_query = jnp.concatenate(d_queries, axis=1).astype(query.dtype)
    return d_query, (d_own[1] + d_key).astype(key.dtype), (d_own[2] + d_value).astype(value.dtype)


class _Windowed(NamedTuple):
    """One of the device's two pieces of queries with the keys of its windows, which begin at key `start`."""

    part: Part
    start: Int[Array, ""]


def _windowed(
    size: int, query: Array, key: Array, value: Array, segments: Array | None, window: int
) -> list[_Windowed]:
    """Return the parts of the device's first piece of queries and of its second."""
    both, of_all = _gathered(key, value), None if segments is None else _in_order(segments)
    queries, length, total = jnp.split(query, 2, axis=1), query.shape[1] // 2, both.shape[1]
    num, device = min(-(-(window - 1 + length) // EVEN) * EVEN, total), jax.lax.axis_index(AXIS)
    parts: list[_Windowed] = []
    for place, piece in enumerate((device, 2 * size - 1 - device)):
        start = jnp.maximum((piece + 1) * length - num, 0)
        keys, values = jnp.split(jax.lax.dynamic_slice_in_dim(both, start, num, axis=1), 2)
        pair = None
        if segments is not None and of_all is not None:
            own = jnp.split(segments, 2, axis=1)[place]
            pair = own, jax.lax.dynamic_slice_in_dim(of_all, start, num, axis=1)
        part = Part(queries[place], keys, values, pair, window, piece * length - start)
        parts.append(_Windowed(part, start))
    return parts


def _needed(kernel: Kernel, size: int, part: Part) -> AbstractContextManager[Any]:
    """Return the scope that tells the counter of model FLOPs which share of the work windows need."""
    assert part.window is not None, "the part has no window"
    length = part.query.shape[1]
    done = kernel.twice_multiplied(length, part.key.shape[1], part.window)
    needed = (2 * 2 * size * length - part.window) * part.window  # in the whole sequence
    return jax.named_scope(f"needed_{needed}_of_{2 * size * done}")


def windowed_forward(
    kernel: Kernel,
    size: int,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    window: int,
) -> PartResult:
    """Attend with one of `size` devices' queries, each to its window. Runs on each device."""
    results: list[PartResult] = []
    for part, _ in _windowed(size, query, key, value, segments, window):
        with _needed(kernel, size, part):
            results.append(kernel.forward(part, True))
    out = jnp.concatenate([each.out for each in results], axis=1).astype(query.dtype)
    return PartResult(out, jnp.concatenate([each.log_sum_exp for each in results], axis=2))


def windowed_backward(
    kernel: Kernel,
    size: int,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    window: int,
    result: PartResult,
    d_out: Array,
) -> Gradients:
    """Return the gradients of one device's queries, keys and values. Runs on each device."""
    d_outs, d_queries = jnp.split(d_out, 2, axis=1), list[Array]()
    shape = 2 * key.shape[0], size * key.shape[1], *key.shape[2:]
    d_both = jnp.zeros(shape, jnp.float32)
    for place, (part, start) in enumerate(_windowed(size, query, key, value, segments, window)):
        with _needed(kernel, size, part):
            d_query, *d_keys = kernel.backward(part, True, _of_piece(result, place), d_outs[place])
        d_queries.append(d_query)
        before = jax.lax.dynamic_slice_in_dim(d_both, start, part.key.shape[1], axis=1)
        more = before + jnp.concatenate(d_keys)
        d_both = jax.lax.dynamic_update_slice_in_dim(d_both, more, start, axis=1)
    d_key, d_value = jnp.split(_scattered(d_both, size), 2)
    d_query = jnp.concatenate(d_queries, axis=1).astype(query.dtype)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype)
