"""Run all experts that the tokens chose, however many chose the same: nothing is dropped.

On the device that multiplies, the rows of an expert lie together, and meet its matrix (`grouped_products`).

Where `expert` splits the experts, devices exchange buffers of a fixed size: of a device's choices, the even
share of each other device and an eighth more (`sent_rows`). A buffer belongs to a pair of devices, so any
expert of a device may fill it. If a device is chosen more often, the rest follows in further rounds of
smaller buffers, as many as the fullest device needs. With an even load there are none. The scope
`expected_0_trips` says so to the ledger, which counts the memory of these rounds and not their time.

Where those devices lie in several fast domains, hosts or racks, a token's row crosses once to each domain
that has any of its experts, to the device of the same place there, with the numbers of its experts and their
weights (`_over_domains`). That device takes the rows that it got for its own tokens, and the exchange above
stays in the domain. The sum over a token's experts in a domain returns as one row. DeepEP sends rows so
(https://github.com/deepseek-ai/DeepEP). A device's tokens run in two halves there, so that one half's
messages overlap with the other's products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.config import TransformerModel
from meshwright.sharding import axis_size
from meshwright.trainer.models import Context

from ._dispatch_sizes import TILE_ROWS, rows_between, sent_rows
from .expert_rows import (
    Order,
    Places,
    devices_of_experts,
    exchange,
    exchange_back,
    exchange_between,
    is_split,
    kept,
    matched,
    order_of,
    places_of,
    receive,
    send,
    whole_rows,
)
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
LEAST_ROWS = 4 * TILE_ROWS  # of an expert in half of the tokens: a choice


class Rows(NamedTuple):
    """Say what belongs to rows of several experts.

    `multiply`: multiplies each row with its expert's matrix of a name. `bias_of`: returns each row's bias of
    a name in float32; None where there is none.
    """

    multiply: Callable[[Array, str], Array]
    bias_of: Callable[[str], Array | None]


Mlp = Callable[[Array, Array, Rows], Array]
"""From rows, their factors, and what belongs to their experts, to the results."""
Arrays = tuple[Array, Array, Matrices]
"""A device's tokens, their weights, and the matrices of its experts."""
Known = tuple[Any, ...]
"""Integers that rounds share: the order of choices. They have no gradients."""
Place = Array | int
Round = Callable[[Place, int, Grouping, Arrays, Known], Array]
"""From a round's first place and its number of places, and all that it needs, to its part of the sum."""


class Run(NamedTuple):
    """Hold what the experts of a run share: the axes of their matrices, what each computes, and settings."""

    axes: Mapping[str, Axes]
    mlp: Mlp
    config: TransformerModel
    context: Context

    @property
    def own(self) -> int:
        """Return the number of experts on this device."""
        return (self.config.num_experts or 0) // (self.domains * self.parts)

    @property
    def domains(self) -> int:
        """Return over how many fast domains rows are sent once to each."""
        return self.context.expert_domains

    @property
    def parts(self) -> int:
        """Return the number of devices of a domain that split the experts."""
        return devices_of_experts(self.context)

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
    arrays = tokens, weights, matrices
    if run.domains > 1:
        parts = _parts_of(tokens.shape[0], order, run)
        numbers = jnp.arange(order.counts.size, dtype=jnp.int32)[None, None]
        orders = (order_of(order.expert[part][..., None] == numbers) for part in parts)
        results = [
            _over_domains((tokens[part], weights[part], matrices), own, run)
            for part, own in zip(parts, orders, strict=True)
        ]
        return jnp.concatenate(results)
    if run.senders == 1:
        return _on_its_own(tokens, weights, matrices, order, run)

    def one(low: Place, size: int, how: Grouping, arrays: Arrays, known: Known) -> Array:
        return _round(*arrays, known[0], low, size, how, run)

    return _in_rounds(one, (order,), arrays, weights.size, run)


def _parts_of(num_tokens: int, order: Order, run: Run) -> list[slice]:
    """Return the halves of a device's tokens, or all of them where experts would get too few rows.

    The messages of one half then have the other's products to hide behind. Inside a domain, which is quicker,
    that gained nothing: Qwen3-30B-A3B on 64 H100 was predicted 7 % slower.
    """
    rows = order.expert.size * run.domains * run.parts // order.counts.size
    if num_tokens % 2 or rows < 2 * LEAST_ROWS:
        return [slice(None)]
    return [slice(num_tokens // 2), slice(num_tokens // 2, None)]


def _in_rounds(one: Round, known: Known, arrays: Arrays, choices: int, run: Run) -> Array:
    """Return the sum of all rounds in which the devices of a domain exchange rows.

    Args:
        one: computes a round.
        known: of which the last is the order of a device's rows in the exchange.
        choices: of these rows, at an even load; the others are of no expert here.
    """
    order: Order = known[-1]
    most = order.expert.shape[0] * min(order.expert.shape[1], run.own)  # rows that another device may be sent
    has_rest = run.parts > 1 or choices < order.expert.size
    first = min(most, math.ceil(sent_rows(choices / run.parts))) if has_rest else order.expert.size
    how = run.grouping(choices * run.senders // run.parts)
    if first == most or not has_rest:
        return one(0, first, how, arrays, known)
    fullest = jnp.max(order.counts.reshape(-1, run.own).sum(axis=1))

    def one_round(low: Place, size: int, arrays: Arrays, known: Known) -> Array:
        return one(low, size, how if size == first else run.grouping(run.senders * size), arrays, known)

    return _with_rest(one_round, first, fullest, known, arrays, run)


def _over_domains(arrays: Arrays, order: Order, run: Run) -> Array:
    """Return the sum of the results of each token's experts, of which some lie in other domains."""
    num_tokens, choices = order.expert.shape[0], order.expert.size
    first = rows_between(num_tokens, run.config, run.domains)

    def one(low: Place, size: int, arrays: Arrays, known: Known) -> Array:
        (order,) = known

        def one_inside(
            low_inside: Place, size_inside: int, how: Grouping, arrays: Arrays, known: Known
        ) -> Array:
            # Each round crosses the domains again, or the rows that crossed would be kept for further rounds.
            (tokens, weights, matrices), (order, low, arrived) = arrays, known
            places = _places_between(order, low, size, run)
            rows, its_weights = _across(send(tokens, places), run), _across(send(weights, places), run)
            out = _round(rows, kept(its_weights), matrices, arrived, low_inside, size_inside, how, run)
            return receive(_across(out, run), places)

        arrived = _arrived(order, low, size, run)
        return _in_rounds(one_inside, (order, low, arrived), arrays, choices, run)

    if first == num_tokens:
        return one(0, first, arrays, (order,))
    return _with_rest(one, first, jnp.max(_needed(order, run).sum(axis=0)), (order,), arrays, run)


def _needed(order: Order, run: Run) -> Int[Array, "tokens domains"]:
    """Return 1 where a domain has any of a token's experts, else 0."""
    domains = jnp.arange(run.domains, dtype=jnp.int32)[None, None]
    domain = order.expert // (run.parts * run.own)
    return (domain[..., None] == domains).any(axis=1).astype(jnp.int32)


def _places_between(order: Order, low: Place, size: int, run: Run) -> Places:
    """Return the places of tokens in buffers: of those that need a domain, `size` from `low` on."""
    needed = _needed(order, run)
    number = jnp.cumsum(needed, axis=0) - needed - low
    slots = jnp.arange(run.domains, dtype=jnp.int32)[None] * size + number
    return places_of(slots, (needed > 0) & (number >= 0) & (number < size), run.domains * size)


def _across(rows: Array, run: Run) -> Array:
    """Exchange the buffers of domains, one after another in `rows`."""
    return exchange_between(rows.reshape(run.domains, -1, rows.shape[1]), run.context).reshape(rows.shape)


def _arrived(order: Order, low: Place, size: int, run: Run) -> Order:
    """Return the order of the rows that arrive from all domains, by the experts in this one.

    The numbers of a row's experts travel before it.
    """
    places, of_domain = _places_between(order, low, size, run), run.parts * run.own
    domain = jnp.arange(run.domains * size, dtype=jnp.int32)[:, None] // size
    experts = whole_rows(order.expert + 1, places) - 1 - domain * of_domain
    experts = kept(_across(jnp.where((experts >= 0) & (experts < of_domain), experts, -1), run))
    numbers = jnp.arange(of_domain, dtype=jnp.int32)[None, None]
    return order_of(experts[..., None] == numbers, may_lack=True)


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
    low: Place,
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
    one: Callable[[Place, int, Arrays, Known], Array],
    first: int,
    fullest: Array,
    known: Known,
    arrays: Arrays,
    run: Run,
) -> Array:
    """Return the sum of `one(low, size, arrays, known)` over all rounds.

    The rounds after the first are added where its result lies, and their gradients where its gradients lie.
    So each loop follows the first round, whose messages can be hidden behind its products.

    Args:
        first: the size of the first round.
        fullest: the rows of the largest buffer that this device has to fill.
    """
    later = math.ceil(LATER * first)
    exchanging = run.context.expert_axes + ("tensor",) * is_split("tensor", run.context)
    num_rounds = (jnp.maximum(jax.lax.pmax(fullest, exchanging) - first, 0) + later - 1) // later

    def one_of_rest(i: Array, arrays: Arrays, known: Known) -> Array:
        return one(first + i * later, later, arrays, known)

    @jax.custom_vjp
    def use(known: Known, num_rounds: Array, arrays: Arrays) -> tuple[Arrays, Array]:
        # The last stands for the sum, and brings its gradient to `backward`.
        return arrays, jnp.zeros_like(arrays[0])

    def backward(saved: Any, gradients: tuple[Arrays, Array]) -> tuple[Any, ...]:
        known, num_rounds, arrays = saved
        of_arrays, of_total = gradients

        def add(state: tuple[Array, Any]) -> tuple[Array, Any]:
            i, sums = state
            _, pull = jax.vjp(lambda arrays: one_of_rest(i, arrays, known), arrays)
            return i + 1, jax.tree.map(jnp.add, sums, *pull(of_total))

        with jax.named_scope("expected_0_trips"):
            start = jnp.int32(0), of_arrays
            _, sums = jax.lax.while_loop(lambda state: state[0] < num_rounds, add, start)
        return None, None, sums

    use.defvjp(lambda known, num, arrays: (use(known, num, arrays), (known, num, arrays)), backward)

    @jax.custom_vjp
    def add_rest(out: Array, stand_in: Array, known: Known, num_rounds: Array, arrays: Arrays) -> Array:
        del stand_in

        def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
            i, total = state
            return i + 1, total + one_of_rest(i, arrays, known)

        with jax.named_scope("expected_0_trips"):
            start = jnp.int32(0), out
            return jax.lax.while_loop(lambda state: state[0] < num_rounds, add, start)[1]

    add_rest.defvjp(lambda *given: (add_rest(*given), None), lambda _, g: (g, g, None, None, None))
    same, stand_in = use(known, num_rounds, arrays)
    out = one(0, first, same, known)
    return add_rest(out, stand_in, known, num_rounds, jax.lax.stop_gradient(same))
