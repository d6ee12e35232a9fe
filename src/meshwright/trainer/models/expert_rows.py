"""Move rows between tokens and the experts' buffers, on one device and between devices.

Rows move by gathers, forward and backward: there is no sort, and no scatter-add, whose order of summation a
GPU would choose. Over `expert` buffers travel by all-to-all. Over `tensor`, which splits the tokens by
position, they are all-gathered before the experts and reduce-scattered after them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from meshwright.sharding import axis_size

from ._base_model import Context
from .rematerialisation import EXPERTS


class Places(NamedTuple):
    """The mapping between choices and buffer slots, in both directions.

    `slots` [tokens, choices]: the slot of each choice; beyond the last slot if the choice has none.
    `sources` [slots]: the choice in each slot, as token x choices + choice; beyond the last
    choice if the slot is empty.
    """

    slots: Int[Array, "tokens choices"]
    sources: Int[Array, " slots"]


class Order(NamedTuple):
    """The expert of each choice, how many earlier tokens chose it, and how many tokens chose each expert."""

    expert: Int[Array, "tokens choices"]
    rank: Int[Array, "tokens choices"]
    counts: Int[Array, " experts"]


def order_of(chosen: Bool[Array, "tokens choices experts"]) -> Order:
    """Number the choices of each expert in the order of the tokens."""
    taken = chosen.any(axis=1).astype(jnp.int32)
    before = jnp.cumsum(taken, axis=0) - taken
    rank = jnp.where(chosen, before[:, None], 0).sum(axis=-1)
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


def _to_slots(x: Array, places: Places) -> Array:
    return _rows(x, places.sources // places.slots.shape[1])


def _to_tokens(y: Array, places: Places) -> Array:
    return _rows(y, places.slots).astype(jnp.float32).sum(axis=1).astype(y.dtype)


@jax.custom_vjp
def send(x: Float[Array, "tokens embed"], places: Places) -> Float[Array, "slots embed"]:
    """Return each slot's token; zeros if the slot is empty."""
    return _to_slots(x, places)


@jax.custom_vjp
def receive(y: Float[Array, "slots embed"], places: Places) -> Float[Array, "tokens embed"]:
    """Sum each token's slots; dropped choices add nothing."""
    return _to_tokens(y, places)


@jax.custom_vjp
def matched(weights: Float[Array, "tokens choices"], places: Places) -> Float[Array, " slots"]:
    """Return each slot's weight."""
    return _rows(weights.reshape(-1), places.sources)


# `send` and `receive` are each other's transpose; autodiff would use a scatter-add instead.
send.defvjp(lambda x, p: (_to_slots(x, p), p), lambda p, g: (_to_tokens(g, p), None))
receive.defvjp(lambda y, p: (_to_tokens(y, p), p), lambda p, g: (_to_slots(g, p), None))
matched.defvjp(lambda w, p: (matched(w, p), p), lambda p, g: (_rows(g, p.slots), None))


def is_split(axis: str, context: Context) -> bool:
    """Return whether several devices along an axis have parts of an expert."""
    return axis not in context.expert_axes and axis_size(context.mesh, axis) > 1


def exchange(buffers: Array, context: Context) -> Array:
    """Exchange [parts, slots, ...] of own tokens for [own parts, slots of all devices, ...].

    A part is one expert's buffer, or the buffer of all experts of a device. Buffers that crossed `expert` may
    be saved for the backward pass; others are filled again there.
    """
    if context.expert_axes:
        buffers = jax.lax.all_to_all(buffers, context.expert_axes, split_axis=0, concat_axis=1, tiled=True)
        buffers = checkpoint_name(buffers, "expert_tokens")
        buffers = checkpoint_name(buffers, EXPERTS)  # as shards; gathered over `tensor` again
    if is_split("tensor", context):
        buffers = jax.lax.all_gather(buffers, "tensor", axis=1, tiled=True)
    return buffers


def exchange_back(out: Array, context: Context) -> Array:
    """Return the results of all devices' slots to them: the sum over `tensor`, by `exchange` reversed."""
    if is_split("tensor", context):
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
    if context.expert_axes:
        out = jax.lax.all_to_all(out, context.expert_axes, split_axis=1, concat_axis=0, tiled=True)
    return out
