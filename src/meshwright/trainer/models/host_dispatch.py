"""Send tokens to experts of other hosts once for each host, and from there to the devices of their experts.

Where the devices of `expert` lie in several fast domains, a row for each choice crosses the network several
times: of 8 choices over 2 hosts 4 cross, over 8 hosts 7. So a token's row crosses once to each host that
holds an expert of its choice, 1.0 and 4.7 times, to the device of the same place there, with the choices and
their weights. Inside the host `dropless` exchanges a row for each choice. Each host returns one sum of a
token's results. DeepEP dispatches so (https://github.com/deepseek-ai/DeepEP).

Buffers between hosts have a fixed size, as those of `dropless`: an even share of the tokens and a spare. What
exceeds it follows in further rounds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from meshwright.config import needed_share, sent_rows

from .dropless import LATER, Matrices, Run, dropless, with_rest
from .expert_rows import Order, order_of, places_of, receive, send
from .rematerialisation import EXPERTS


class Crossing(NamedTuple):
    """Say which hosts a token needs, how many earlier tokens need the same, and the expert of each choice."""

    needed: Bool[Array, "tokens hosts"]
    rank: Int[Array, "tokens hosts"]
    expert: Int[Array, "tokens choices"]


def over_hosts(
    tokens: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens choices"],
    matrices: Matrices,
    order: Order,
    run: Run,
) -> Float[Array, "tokens embed"]:
    """Return the sum of the results of each token's experts, weighted, as `dropless`; once to each host.

    Args:
        tokens: of one device.
        weights: the router's.
        matrices: of this device's experts.
        order: the experts that the tokens chose.
        run: what an expert computes, and how; its context says over how many hosts the experts lie.
    """
    num_experts, hosts = run.own * run.parts, run.context.expert_hosts
    host = order.expert // (num_experts // hosts)
    needed = (host[:, :, None] == jnp.arange(hosts)[None, None]).any(axis=1)
    counts = needed.astype(jnp.int32)
    crossing = Crossing(needed, jnp.cumsum(counts, axis=0) - counts, order.expert)
    share = needed_share(num_experts, weights.shape[1], hosts)
    most = tokens.shape[0]
    first = min(most, math.ceil(sent_rows(most * share)))
    later = math.ceil(LATER * first)
    rest: Array | float = 0.0
    if first < most:
        fullest = jax.lax.pmax(counts.sum(axis=0).max(), run.exchanging)
        left = jnp.maximum(fullest - first, 0)

        def one_of_rest(
            i: Array, tokens: Array, weights: Array, matrices: Matrices, crossing: Crossing
        ) -> Array:
            return _round(tokens, weights, matrices, crossing, first + i * later, later, later / first, run)

        arrays = (tokens, weights, matrices)
        num_rounds = (left + later - 1) // later
        tokens, weights, matrices, rest = with_rest(one_of_rest, num_rounds, crossing, *arrays)
    return _round(tokens, weights, matrices, crossing, jnp.int32(0), first, 1.0, run) + rest


def _round(
    tokens: Array,
    weights: Array,
    matrices: Matrices,
    crossing: Crossing,
    low: Array,
    size: int,
    part: float,
    run: Run,
) -> Array:
    """Compute the tokens from `low` on, `size` of each device's for each host, and return their results.

    `part`: of all choices, how many these have.
    """
    num_experts, hosts = run.own * run.parts, run.context.expert_hosts
    per_host, members = num_experts // hosts, run.parts // hosts
    number = crossing.rank - low
    slots = jnp.arange(hosts, dtype=jnp.int32)[None] * size + number
    is_placed = crossing.needed & (number >= 0) & (number < size)
    places = places_of(slots, is_placed, hosts * size)
    rows = checkpoint_name(_between_hosts(send(tokens, places), run), "expert_tokens")
    rows = checkpoint_name(rows, EXPERTS)
    theirs = _between_hosts(send(weights, places), run)
    none = jnp.iinfo(jnp.int32).min
    expert = jnp.take(crossing.expert, places.sources // hosts, axis=0, mode="fill", fill_value=none)
    here = jax.lax.axis_index(run.context.expert_axes) // members
    expert = _between_hosts(expert, run) - here * per_host
    is_own = (expert >= 0) & (expert < per_host)
    order = order_of(is_own[:, :, None] & (expert[:, :, None] == jnp.arange(per_host)[None, None]))
    inside = tuple(tuple(range(host * members, (host + 1) * members)) for host in range(hosts))
    own = run._replace(groups=inside, num_rows=math.ceil(part * weights.size))
    out = dropless(rows, theirs, matrices, order._replace(is_chosen=is_own), own)
    return receive(_between_hosts(out, run), places)


def _between_hosts(x: Array, run: Run) -> Array:
    """Exchange [hosts x slots, ...] with the devices of the same place in other hosts; its own inverse."""
    hosts, members = run.context.expert_hosts, run.parts // run.context.expert_hosts
    groups = [[host * members + member for host in range(hosts)] for member in range(members)]
    return jax.lax.all_to_all(
        x, run.context.expert_axes, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True
    )
