"""Run all experts that the tokens chose, however many chose the same: nothing is dropped.

On the device that multiplies, the rows of an expert fill whole tiles (`grouped_products`), as many as it has.

Where `expert` splits the experts, devices exchange buffers of a fixed size: of a device's choices, the even
share of each other device and an eighth more (`sent_rows`). A buffer belongs to a pair of devices, so any
expert of a device may fill it. If a device is chosen more often, the rest follows in further rounds of
smaller buffers, as many as the fullest device needs. With an even load there are none. The scope
`expected_0_trips` says so to the ledger, which counts the memory of these rounds and not their time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.config import TransformerModel, sent_rows
from meshwright.sharding import axis_size

from ._base_model import Context
from .expert_rows import Order, Places, exchange, exchange_back, is_split, matched, places_of, receive, send
from .grouped_products import Grouping, Tiles, grouped_product, grouping_for, tiles_for, tiles_of

LATER = 1 / 4  # of the first round's buffers, in those of the rounds that follow
Mlp = Callable[[Array, Array, dict[str, Any], Callable[[Array, Any], Array]], Array]
"""From rows, their factors, the experts' matrices and what multiplies rows with a matrix, to the results."""


class _Sizes(NamedTuple):
    """What is known before the run: experts, of this device and in all, and devices that exchange rows."""

    experts: int
    own: int
    senders: int
    fair: int  # rows of this device with an even load


def dropless(
    tokens: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens choices"],
    matrices: dict[str, Any],
    order: Order,
    mlp: Mlp,
    config: TransformerModel,
    context: Context,
) -> Float[Array, "tokens embed"]:
    """Return the sum of the results of each token's experts, weighted; over `tensor` of all its devices.

    Args:
        tokens: of one device.
        weights: the router's.
        matrices: of this device's experts, whole but for `tensor`.
        order: the experts that the tokens chose.
        mlp: what an expert computes.
    """
    experts, choices = config.num_experts or 0, weights.shape[1]
    own, others = experts // axis_size(context.mesh, "expert"), axis_size(context.mesh, "tensor")
    senders = experts // own * others
    sizes = _Sizes(experts, own, senders, weights.size * others)
    if senders == 1:
        how = _grouping(weights.size, sizes, context)
        num_tiles = tiles_for(weights.size, experts, how.tile)
        tiles = tiles_of(order.counts, num_tiles, how.tile)
        slots = tiles.start[order.expert] * how.tile + order.rank
        places = places_of(slots, jnp.ones(slots.shape, bool), num_tiles * how.tile)
        factors = matched(weights, places)[:, None]
        return receive(_in_tiles(send(tokens, places), factors, matrices, tiles, how, mlp), places)

    most = tokens.shape[0] * min(choices, own)  # rows of this device that another may be sent
    fair = weights.size * own / experts
    first = weights.size if own == experts else min(most, math.ceil(sent_rows(fair)))
    later = math.ceil(LATER * first)

    def round_of(size: int, low: Array, tokens: Array, weights: Array, matrices: Any, order: Order) -> Array:
        rows = sizes.fair if size == first else sizes.senders * size
        how = _grouping(rows, sizes, context)
        return _round(tokens, weights, matrices, order, low, size, sizes, how, mlp, context)

    rest = jnp.zeros_like(tokens)
    if first < most and own < experts:
        fullest = jnp.max(order.counts.reshape(-1, own).sum(axis=1))
        fullest = jax.lax.pmax(fullest, tuple(a for a in ("expert", "tensor") if is_split(a, context)))
        num_rounds = jnp.maximum(fullest - first + later - 1, 0) // later

        def one_of_rest(i: Array, *arrays: Any) -> Array:
            return round_of(later, first + i * later, *arrays)

        tokens, weights, matrices, rest = _with_rest(
            one_of_rest, num_rounds, order, tokens, weights, matrices
        )
    return round_of(first, jnp.int32(0), tokens, weights, matrices, order) + rest


def _grouping(rows: int, sizes: _Sizes, context: Context) -> Grouping:
    return grouping_for(rows, sizes.own, context.platform, context.compute_capability)


def _in_tiles(x: Array, factors: Array, matrices: Any, tiles: Tiles, how: Grouping, mlp: Mlp) -> Array:
    """Run the experts on rows in tiles."""
    executed = x.shape[0] if how.by_kernel is None else how.executed
    with jax.named_scope(f"needed_{min(how.rows, executed)}_of_{executed}"):
        return mlp(x, factors, matrices, lambda x, matrix: grouped_product(x, matrix, tiles, how))


def _round(
    tokens: Array,
    weights: Array,
    matrices: Any,
    order: Order,
    low: Array,
    size: int,
    sizes: _Sizes,
    how: Grouping,
    mlp: Mlp,
    context: Context,
) -> Array:
    """Compute the choices from `low` on, `size` of each device's for each other, and return their results.

    A device's choices are numbered for each other device by expert, then by token.
    """
    parts = sizes.experts // sizes.own
    counts = order.counts.reshape(parts, sizes.own)
    starts = jnp.cumsum(counts, axis=1) - counts
    number = starts.reshape(-1)[order.expert] + order.rank - low
    slots = order.expert // sizes.own * size + number
    places = places_of(slots, (number >= 0) & (number < size), parts * size)
    arrived = exchange(send(tokens, places).reshape(parts, size, -1), context)
    factors = exchange(matched(weights, places).reshape(parts, size, 1), context)
    begin, end = (jnp.clip(edge - low, 0, size) for edge in (starts, starts + counts))
    begin, end = (exchange(edge[:, None], context).reshape(-1, sizes.own) for edge in (begin, end))
    within, tiles = _tiled(begin, end, size, how)
    to_tiles = partial(send, places=within)
    rows = to_tiles(arrived.reshape(-1, arrived.shape[-1]))
    out = _in_tiles(rows, to_tiles(factors.reshape(-1, 1)), matrices, tiles, how, mlp)
    out = receive(out, within).reshape(arrived.shape)
    return receive(exchange_back(out, context).reshape(parts * size, -1), places)


def _tiled(
    begin: Int[Array, "senders own"], end: Int[Array, "senders own"], size: int, how: Grouping
) -> tuple[Places, Tiles]:
    """Put the rows that arrived into tiles of one expert: by expert, then by sender.

    Args:
        begin, end: of each sender's `size` rows, those of each expert.
    """
    senders, own = begin.shape
    counts = end - begin
    tiles = tiles_of(counts.sum(axis=0), tiles_for(senders * size, own, how.tile), how.tile)
    first = tiles.start[:-1][None] * how.tile + jnp.cumsum(counts, axis=0) - counts
    row = jnp.arange(size, dtype=jnp.int32)
    # The expert of each row, by the ends that lie at or before it.
    expert = (end[:, None] <= row[None, :, None]).astype(jnp.int32).sum(axis=2)
    is_filled = expert < own
    expert = jnp.minimum(expert, own - 1)
    slots = row[None] + jnp.take_along_axis(first - begin, expert, axis=1)
    num_slots = tiles.expert.size * how.tile
    return places_of(slots.reshape(-1, 1), is_filled.reshape(-1, 1), num_slots), tiles


def _with_rest(
    one: Callable[..., Array], num_rounds: Array, order: Order, tokens: Array, weights: Array, matrices: Any
) -> tuple[Array, Array, Any, Array]:
    """Return tokens, weights and matrices as they are, and the sum of `one(i, ...)` over all rounds.

    The gradients of the first round, which uses what is returned, are added to where they lie.
    """

    @jax.custom_vjp
    def use(order: Order, num_rounds: Array, *arrays: Any) -> tuple[Any, ...]:
        def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
            i, total = state
            return i + 1, total + one(i, *arrays, order)

        with jax.named_scope("expected_0_trips"):
            start = jnp.int32(0), jnp.zeros_like(arrays[0])
            _, total = jax.lax.while_loop(lambda state: state[0] < num_rounds, add, start)
        return *arrays, total

    def forward(order: Order, num_rounds: Array, *arrays: Any) -> tuple[Any, Any]:
        return use(order, num_rounds, *arrays), (order, num_rounds, arrays)

    def backward(saved: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        order, num_rounds, arrays = saved
        *of_arrays, of_total = gradients

        def add(state: tuple[Array, Any]) -> tuple[Array, Any]:
            i, sums = state
            _, pull = jax.vjp(lambda *arrays: one(i, *arrays, order), *arrays)
            return i + 1, jax.tree.map(jnp.add, sums, tuple(pull(of_total)))

        with jax.named_scope("expected_0_trips"):
            start = jnp.int32(0), tuple(of_arrays)
            _, sums = jax.lax.while_loop(lambda state: state[0] < num_rounds, add, start)
        return None, None, *sums

    use.defvjp(forward, backward)
    return use(order, num_rounds, tokens, weights, matrices)
