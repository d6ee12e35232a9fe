"""Run all experts that the tokens chose, however many chose the same: nothing is dropped.

On the device that multiplies, the rows of an expert lie together, and meet its matrix (`grouped_products`).

Where `expert` splits the experts, devices exchange buffers of a fixed size: of a device's choices, the even
share of each other device and an eighth more (`sent_rows`). A buffer belongs to a pair of devices, so any
expert of a device may fill it. If a device is chosen more often, the rest follows in further rounds of
smaller buffers, as many as the fullest device needs. With an even load there are none. The scope
`expected_0_trips` says so to the ledger, which counts the memory of these rounds and not their time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.config import TransformerModel, sent_rows
from meshwright.sharding import axis_size, whole_size

from ._base_model import Context
from .expert_rows import Order, Places, exchange, exchange_back, is_split, matched, places_of, receive, send
from .grouped_products import (
    Axes,
    Grouping,
    Tiles,
    grouped_fp8_product,
    grouped_product,
    grouping_for,
    rows_of_bias,
    tiles_of,
)

Matrices = dict[str, Any]
LATER = 1 / 4  # of the first round's buffers, in those of the rounds that follow


class Rows(NamedTuple):
    """Say what belongs to rows of several experts.

    `multiply`: multiplies each row with its expert's matrix of a name. `bias_of`: returns each row's bias of
    a name in float32; None where there is none.
    """

    multiply: Callable[[Array, str], Array]
    bias_of: Callable[[str], Array | None]


Mlp = Callable[[Array, Array, Rows], Array]
"""From rows, their factors, and what belongs to their experts, to the results."""


class Run(NamedTuple):
    """Hold what the experts of a run share: the axes of their matrices, what each computes, and settings."""

    axes: Mapping[str, Axes]
    mlp: Mlp
    config: TransformerModel
    context: Context

    @property
    def own(self) -> int:
        """Return the number of experts on this device."""
        return (self.config.num_experts or 0) // self.parts

    @property
    def parts(self) -> int:
        """Return the number of devices that split the experts."""
        return math.prod(whole_size(self.context.mesh, axis) for axis in self.context.expert_axes)

    @property
    def senders(self) -> int:
        """Return the number of devices whose rows one device multiplies."""
        return self.parts * (
            axis_size(self.context.mesh, "tensor") if is_split("tensor", self.context) else 1
        )

    def grouping(self, rows: int) -> Grouping:
        """Return how this device multiplies `rows` rows."""
        context, split = self.context, self.senders // self.parts  # over `tensor`, the hidden units
        sides = self.config.embed_dim, self.config.mlp_dim // split
        biased = self.config.expert_bias
        return grouping_for(
            rows, self.own, sides, context.platform, context.compute_capability, biased=biased
        )

    def in_tiles(self, x: Array, factors: Array, matrices: Matrices, tiles: Tiles, how: Grouping) -> Array:
        """Run the experts on rows that are grouped by expert."""

        def multiply(x: Array, name: str) -> Array:
            product = grouped_fp8_product if self.context.fp8 else grouped_product
            return product(x, matrices[name], tiles, how, self.axes[name])

        def bias_of(name: str) -> Array | None:
            return rows_of_bias(matrices[name], tiles, how.tile) if name in matrices else None

        if how.by_kernel is not None:  # each kernel has its own padding, and says so
            return self.mlp(x, factors, Rows(multiply, bias_of))
        with jax.named_scope(f"needed_{min(how.rows, x.shape[0])}_of_{x.shape[0]}"):
            return self.mlp(x, factors, Rows(multiply, bias_of))


def dropless(
    tokens: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens choices"],
    matrices: Matrices,
    order: Order,
    run: Run,
) -> Float[Array, "tokens embed"]:
    """Return the sum of the results of each token's experts, weighted; over `tensor` of all its devices.

    Args:
        tokens: of one device.
        weights: the router's.
        matrices: of this device's experts, whole but for `tensor`; and their biases [experts, outputs].
        order: the experts that the tokens chose.
        run: what an expert computes, and how.
    """
    if run.senders == 1:
        return _on_its_own(tokens, weights, matrices, order, run)
    fair = weights.size / run.parts
    most = tokens.shape[0] * min(weights.shape[1], run.own)  # rows of this device that another may be sent
    first = weights.size if run.parts == 1 else min(most, math.ceil(sent_rows(fair)))
    later = math.ceil(LATER * first)
    how = run.grouping(weights.size * run.senders // run.parts)
    if first < most and run.parts > 1:
        fullest = jnp.max(order.counts.reshape(-1, run.own).sum(axis=1))
        exchanging = run.context.expert_axes + ("tensor",) * is_split("tensor", run.context)
        left = jnp.maximum(jax.lax.pmax(fullest, exchanging) - first, 0)

        def one_of_rest(i: Array, tokens: Array, weights: Array, matrices: Matrices, order: Order) -> Array:
            of_rest = run.grouping(run.senders * later)
            return _round(tokens, weights, matrices, order, first + i * later, later, of_rest, run)

        def one_of_first(tokens: Array, weights: Array, matrices: Matrices) -> Array:
            return _round(tokens, weights, matrices, order, jnp.int32(0), first, how, run)

        num_rounds = (left + later - 1) // later
        return _with_rest(one_of_first, one_of_rest, num_rounds, order, (tokens, weights, matrices))
    return _round(tokens, weights, matrices, order, jnp.int32(0), first, how, run)


def _on_its_own(tokens: Array, weights: Array, matrices: Matrices, order: Order, run: Run) -> Array:
    """Run all experts on one device, which exchanges no rows."""
    how = run.grouping(weights.size)
    tiles = tiles_of(order.counts, weights.size, how)
    slots = tiles.first[order.expert] + order.rank
    places = places_of(slots, jnp.ones(slots.shape, bool), how.num_slots(weights.size))
    factors = matched(weights, places)[:, None]
    return receive(run.in_tiles(send(tokens, places), factors, matrices, tiles, how), places)


def _round(
    tokens: Array,
    weights: Array,
    matrices: Matrices,
    order: Order,
    low: Array,
    size: int,
    how: Grouping,
    run: Run,
) -> Array:
    """Compute the choices from `low` on, `size` of each device's for each other, and return their results.

    A device's choices are numbered for each other device by expert, then by token.
    """
    counts = order.counts.reshape(run.parts, run.own)
    starts = jnp.cumsum(counts, axis=1) - counts
    number = starts.reshape(-1)[order.expert] + order.rank - low
    slots = order.expert // run.own * size + number
    places = places_of(slots, (number >= 0) & (number < size), run.parts * size)
    arrived = exchange(send(tokens, places).reshape(run.parts, size, -1), run.context)
    factors = exchange(matched(weights, places).reshape(run.parts, size, 1), run.context)
    edges = (jnp.clip(edge - low, 0, size)[:, None] for edge in (starts, starts + counts))
    begin, end = (exchange(edge, run.context).reshape(-1, run.own) for edge in edges)
    within, tiles = _grouped(begin, end, size, how)
    rows = send(arrived.reshape(-1, arrived.shape[-1]), within)
    out = run.in_tiles(rows, send(factors.reshape(-1, 1), within), matrices, tiles, how)
    out = exchange_back(receive(out, within).reshape(arrived.shape), run.context)
    return receive(out.reshape(run.parts * size, -1), places)


def _grouped(
    begin: Int[Array, "senders own"], end: Int[Array, "senders own"], size: int, how: Grouping
) -> tuple[Places, Tiles]:
    """Group the rows that arrived by expert, then by sender.

    Args:
        begin, end: of each sender's `size` rows, those of each expert.
    """
    senders, own = begin.shape
    counts = end - begin
    tiles = tiles_of(counts.sum(axis=0), senders * size, how)
    first = tiles.first[None] + jnp.cumsum(counts, axis=0) - counts
    row = jnp.arange(size, dtype=jnp.int32)
    # The expert of each row, by the ends that lie at or before it.
    expert = (end[:, None] <= row[None, :, None]).astype(jnp.int32).sum(axis=2)
    is_filled = expert < own
    expert = jnp.minimum(expert, own - 1)
    slots = row[None] + jnp.take_along_axis(first - begin, expert, axis=1)
    num_slots = how.num_slots(senders * size)
    return places_of(slots.reshape(-1, 1), is_filled.reshape(-1, 1), num_slots), tiles


def _with_rest(
    first: Callable[..., Array],
    one: Callable[..., Array],
    num_rounds: Array,
    order: Order,
    arrays: tuple[Array, Array, Matrices],
) -> Array:
    """Return `first(*arrays)` and the sum of `one(i, *arrays, order)` over all rounds that follow.

    The rounds are added where the first one's result lies, and their gradients where its gradients lie. So
    each loop follows the first round, whose messages can be hidden behind its products.
    """

    @jax.custom_vjp
    def use(order: Order, num_rounds: Array, *arrays: Any) -> tuple[Any, ...]:
        # The last stands for the sum, and brings its gradient to `backward`.
        return *arrays, jnp.zeros_like(arrays[0])

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

    use.defvjp(lambda order, num, *arrays: (use(order, num, *arrays), (order, num, arrays)), backward)

    @jax.custom_vjp
    def add_rest(out: Array, stand_in: Array, order: Order, num_rounds: Array, arrays: Any) -> Array:
        del stand_in

        def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
            i, total = state
            return i + 1, total + one(i, *arrays, order)

        with jax.named_scope("expected_0_trips"):
            start = jnp.int32(0), out
            return jax.lax.while_loop(lambda state: state[0] < num_rounds, add, start)[1]

    add_rest.defvjp(lambda *given: (add_rest(*given), None), lambda _, g: (g, g, None, None, None))
    *same, stand_in = use(order, num_rounds, *arrays)
    return add_rest(first(*same), stand_in, order, num_rounds, jax.lax.stop_gradient(same))
