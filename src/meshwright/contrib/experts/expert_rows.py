"""Move rows between tokens and the experts' buffers, on one device and between devices.

Rows move by gathers, forward and backward: there is no sort, and no scatter-add, whose order of summation a
GPU would choose. Over `expert` buffers travel by all-to-all. Over `tensor`, which splits the tokens by
position, they are all-gathered before the experts and reduce-scattered after them.

Where the devices of `expert` lie in several fast domains (`Context.expert_domains`), `exchange` stays inside
each, and `exchange_between` is of the devices that have the same place in each domain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from meshwright.sharding import axis_size, whole_size
from meshwright.trainer.models import Context
from meshwright.trainer.models.rematerialisation import EXPERTS

NO_RANK = -(2**30)  # of a choice of no expert: before every place, whatever is added


class Places(NamedTuple):
    """The mapping between choices and buffer slots, in both directions.

    `slots` [tokens, choices]: the slot of each choice; beyond the last slot if the choice has none.
    `sources` [slots]: the choice in each slot, as token x choices + choice; beyond the last
    choice if the slot is empty.
    """

    slots: Int[Array, "tokens choices"]
    sources: Int[Array, " slots"]


class Order(NamedTuple):
    """The expert of each choice, how many earlier tokens chose it, and how many tokens chose each expert.

    A choice of no expert has the rank `NO_RANK`.
    """

    expert: Int[Array, "tokens choices"]
    rank: Int[Array, "tokens choices"]
    counts: Int[Array, " experts"]


def order_of(chosen: Bool[Array, "tokens choices experts"], *, may_lack: bool = False) -> Order:
    """Number the choices of each expert in the order of the tokens.

    Args:
        may_lack: some choices are of no expert.
    """
    taken = chosen.any(axis=1).astype(jnp.int32)
    before = jnp.cumsum(taken, axis=0) - taken
    rank = jnp.where(chosen, before[:, None], 0).sum(axis=-1)
    if may_lack:
        rank = jnp.where(chosen.any(axis=-1), rank, NO_RANK)
    return Order(jnp.argmax(chosen, axis=-1).astype(jnp.int32), rank, taken.sum(axis=0))


def places_of(slots: Int[Array, "tokens choices"], is_placed: Bool[Array, ...], num_slots: int) -> Places:
    """Put choices into `num_slots` slots, each into its own of `slots`, but those that are not placed."""
    choices = jnp.arange(slots.size, dtype=jnp.int32)
    # Each choice without a place gets its own number beyond the end, so that indices stay unique.
    slots = jnp.where(is_placed, slots, num_slots + choices.reshape(slots.shape))
    empty = jnp.full(num_slots, choices.size, jnp.int32)
    sources = empty.at[slots.reshape(-1)].set(choices, mode="drop", unique_indices=True)
    return Places(slots, sources)


def _rows(x: Array, places: Array) -> Array:
    """Return the rows of `x` at `places`; zeros for indices beyond its end."""
    return jnp.take(x, places, axis=0, mode="fill", fill_value=0)


def whole_rows(x: Array, places: Places) -> Array:
    """Return the row of each slot's token, without a gradient of its own; zeros if the slot is empty."""
    return _rows(x, places.sources // places.slots.shape[1])


def _to_tokens(y: Array, places: Places) -> Array:
    return _rows(y, places.slots).astype(jnp.float32).sum(axis=1).astype(y.dtype)


@jax.custom_vjp
def send(x: Float[Array, "tokens embed"], places: Places) -> Float[Array, "slots embed"]:
    """Return each slot's token; zeros if the slot is empty."""
    return whole_rows(x, places)


@jax.custom_vjp
def receive(y: Float[Array, "slots embed"], places: Places) -> Float[Array, "tokens embed"]:
    """Sum each token's slots; dropped choices add nothing."""
    return _to_tokens(y, places)


@jax.custom_vjp
def matched(weights: Float[Array, "tokens choices"], places: Places) -> Float[Array, " slots"]:
    """Return each slot's weight."""
    return _rows(weights.reshape(-1), places.sources)


# `send` and `receive` are each other's transpose; autodiff would use a scatter-add instead.
send.defvjp(lambda x, p: (whole_rows(x, p), p), lambda p, g: (_to_tokens(g, p), None))
receive.defvjp(lambda y, p: (_to_tokens(y, p), p), lambda p, g: (whole_rows(g, p), None))
matched.defvjp(lambda w, p: (matched(w, p), p), lambda p, g: (_rows(g, p.slots), None))


def is_split(axis: str, context: Context) -> bool:
    """Return whether several devices along an axis have parts of an expert."""
    return axis not in context.expert_axes and axis_size(context.mesh, axis) > 1


def devices_of_experts(context: Context) -> int:
    """Return the number of devices of one fast domain that split the experts."""
    return math.prod(whole_size(context.mesh, axis) for axis in context.expert_axes) // context.expert_domains


def _groups(context: Context, *, inside: bool) -> list[list[int]] | None:
    """Return which places along `expert_axes` exchange rows; None if all do.

    Those of a domain lie one after another.
    """
    domains, members = context.expert_domains, devices_of_experts(context)
    if domains == 1:
        return None
    rows = [[domain * members + member for member in range(members)] for domain in range(domains)]
    return rows if inside else [list(column) for column in zip(*rows, strict=True)]


def _to_all(x: Array, context: Context, split: int, concat: int, *, inside: bool = True) -> Array:
    """Return `x` after an all-to-all over `expert_axes`, inside of each domain or between domains."""
    if inside and devices_of_experts(context) == 1:
        return x
    return jax.lax.all_to_all(
        x,
        context.expert_axes,
        split_axis=split,
        concat_axis=concat,
        tiled=True,
        axis_index_groups=_groups(context, inside=inside),
    )


def exchange_between(buffers: Array, context: Context) -> Array:
    """Exchange [domains, slots, ...] of own tokens for those that the other domains' devices sent.

    The same exchange returns results.
    """
    return _to_all(buffers, context, 0, 0, inside=False)


def exchange(buffers: Array, context: Context) -> Array:
    """Exchange [parts, slots, ...] of own tokens for [own parts, slots of all devices, ...].

    A part is one expert's buffer, or the buffer of all experts of a device. Buffers that crossed `expert` may
    be saved for the backward pass; others are filled again there.
    """
    if context.expert_axes:
        buffers = kept(_to_all(buffers, context, 0, 1))  # as shards; gathered over `tensor` again
    if is_split("tensor", context):
        buffers = jax.lax.all_gather(buffers, "tensor", axis=1, tiled=True)
    return buffers


def exchange_back(out: Array, context: Context) -> Array:
    """Return the results of all devices' slots to them: the sum over `tensor`, by `exchange` reversed."""
    if is_split("tensor", context):
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
    return _to_all(out, context, 1, 0) if context.expert_axes else out


def kept(arrived: Array) -> Array:
    """Return what arrived over `expert`, by the names under which policies keep it."""
    return checkpoint_name(checkpoint_name(arrived, "expert_tokens"), EXPERTS)
