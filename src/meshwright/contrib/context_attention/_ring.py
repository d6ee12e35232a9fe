"""Attend to the keys of a sequence over `context` as they go round a ring.

Causal attention among a device's own positions, then two pairs of pieces for each other device's keys.
The device's second piece always attends to the other's first piece. In addition, if the other device comes
earlier in the ring, first piece attends to first piece; otherwise second piece attends to second piece.

The next device's keys travel while the present ones are used. In the backward pass the gradients of keys
and values follow them round the ring in float32; one last hop returns them to their device in the compute
format. Saved for the backward pass: output and log-sum-exp over all hops, nothing per hop. If windows hold
several documents, their segments travel with the keys, and plain blocks do the work on every target.

Sources: the ring, Liu et al. 2023 (arXiv 2310.01889); its balance, Brandon et al. 2023 (arXiv 2311.09431).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array

from meshwright.trainer.models import Tree
from meshwright.trainer.models.attention_blocks import AXIS, Gradients, Kernel, Part, PartResult, merged


class _RingKeys(NamedTuple):
    """Keys and values of one device, or of one of its pieces, as they travel round the ring.

    `both` stacks keys and values in one array [2 x batch, sequence, kv_heads, head_dim], to send one message.
    XLA runs one permutation at a time, so with two messages it would overlap only one with computation.
    """

    both: Array
    segments: Array | None

    def part(self, query: Array, segments: Array | None) -> Part:
        """Return the part in which `query` attends to these keys."""
        both = None if segments is None or self.segments is None else (segments, self.segments)
        key, value = jnp.split(self.both, 2)
        return Part(query, key, value, both)


def _halves(tree: Tree) -> tuple[Tree, Tree]:
    """Split arrays [batch, sequence, ...] into those of the device's first piece and of its second."""
    half = jax.tree.leaves(tree)[0].shape[1] // 2
    return jax.tree.map(lambda x: x[:, :half], tree), jax.tree.map(lambda x: x[:, half:], tree)


def _either(condition: Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _onward(tree: Tree, size: int) -> Tree:
    """Send every array to the next device in the ring."""
    pairs = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def ring_forward(
    kernel: Kernel, size: int, query: Array, key: Array, value: Array, segments: Array | None
) -> PartResult:
    """Attend with one device's queries to the keys of all devices. Runs on each device."""
    device = jax.lax.axis_index(AXIS)
    keys = _RingKeys(jnp.concatenate([key, value]), segments)
    own = kernel.forward(keys.part(query, segments), True)
    half = query.shape[1] // 2
    results = (
        PartResult(own.out[:, :half], own.log_sum_exp[:, :, :half]),
        PartResult(own.out[:, half:], own.log_sum_exp[:, :, half:]),
    )
    first, second = _halves((query, segments))

    def hop(
        number: Array | int, results: tuple[PartResult, ...], keys: _RingKeys
    ) -> tuple[PartResult, PartResult]:
        earlier = number <= device  # these keys come from device (device - number) modulo size
        low, high = _halves(keys)
        late = kernel.forward(low.part(*second), False)
        mine, theirs = _either(earlier, first, second), _either(earlier, low, high)
        out, log_sum_exp = kernel.forward(theirs.part(*mine), False)
        to_first = PartResult(out, jnp.where(earlier, log_sum_exp, -jnp.inf))
        to_second = PartResult(out, jnp.where(earlier, -jnp.inf, log_sum_exp))
        return merged(results[0], to_first), merged(merged(results[1], late), to_second)

    def one(carry: tuple[Any, _RingKeys], number: Array) -> tuple[Any, None]:
        results, keys = carry
        following = _onward(keys, size)  # overlaps with the work on the present keys
        return (hop(number, results, keys), following), None

    keys = _onward(keys, size)
    if size > 2:
        (results, keys), _ = jax.lax.scan(one, (results, keys), jnp.arange(1, size - 1))
    results = hop(size - 1, results, keys)
    out = jnp.concatenate([x.out for x in results], axis=1).astype(query.dtype)
    return PartResult(out, jnp.concatenate([x.log_sum_exp for x in results], axis=2))


def ring_backward(
    kernel: Kernel,
    size: int,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    result: PartResult,
    d_out: Array,
) -> Gradients:
    """Return the gradients of one device's queries, keys and values over the ring. Runs on each device."""
    device = jax.lax.axis_index(AXIS)
    keys = _RingKeys(jnp.concatenate([key, value]), segments)
    d_query, *d_own = kernel.backward(keys.part(query, segments), True, result, d_out)
    d_keys = jnp.concatenate(d_own)  # one array to send one message, as with the keys
    log_sum_exp = rearrange(result.log_sum_exp, "b h s -> b s h")
    first, second = _halves((query, segments, result.out, log_sum_exp, d_out))

    def back(mine: Tree, keys: _RingKeys) -> tuple[Array, Array]:
        query, segments, out, log_sum_exp, d_out = mine
        result = PartResult(out, rearrange(log_sum_exp, "b s h -> b h s"))
        d_query, d_key, d_value = kernel.backward(keys.part(query, segments), False, result, d_out)
        return d_query, jnp.concatenate([d_key, d_value])

    def hop(number: Array | int, keys: _RingKeys) -> tuple[Array, Array]:
        earlier = number <= device
        low, high = _halves(keys)
        late = back(second, low)
        other = back(_either(earlier, first, second), _either(earlier, low, high))
        to_first = [jnp.where(earlier, x, 0) for x in other]
        to_second = [jnp.where(earlier, 0, x) for x in other]
        d_query = jnp.concatenate([to_first[0], late[0] + to_second[0]], axis=1)
        return d_query, jnp.concatenate([late[1] + to_first[1], to_second[1]], axis=1)

    def one(carry: tuple[Array, Array, _RingKeys], number: Array) -> tuple[Any, None]:
        d_query, d_keys, keys = carry
        following, d_keys = _onward(keys, size), _onward(d_keys, size)
        more_query, more_keys = hop(number, keys)
        return (d_query + more_query, d_keys + more_keys, following), None

    keys = _onward(keys, size)
    if size > 2:
        carry = (d_query, d_keys, keys)
        (d_query, d_keys, keys), _ = jax.lax.scan(one, carry, jnp.arange(1, size - 1))
    more_query, more_keys = hop(size - 1, keys)
    # The last hop returns them to their device.
    d_keys = _onward((_onward(d_keys, size) + more_keys).astype(key.dtype), size)
    d_key, d_value = jnp.split(d_keys, 2)
    return (d_query + more_query).astype(query.dtype), d_key, d_value
