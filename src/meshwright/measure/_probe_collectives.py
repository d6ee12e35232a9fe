"""The probe of collectives: latency and bytes per second by kind and group size. With jax.

All local devices take part, in as many groups side by side as there is room for, as in a step.
* Latency: a chain of small messages, each of which needs the one before; more links less fewer, so that the
  start of the program cancels.
* Bytes per second: what a large message takes beyond a small one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..predict import MeasuredCollective
from ._best import best_seconds

LARGE_BYTES, SMALL_BYTES = 2**24, 2**12  # of the whole array
SHORT_CHAIN, LONG_CHAIN = 2, 10
LEAST_SECONDS = 1e-9  # the clock's tick: a difference that noise turned negative is one
ITEM_BYTES = 4
Local = Callable[[jax.Array], jax.Array]
SPLIT = PartitionSpec(("groups", "members"))

# On one device: the collective, what makes its result an argument again, and whether its argument is the
# whole array (rather than this device's part).
KINDS: dict[str, tuple[Local, Callable[[jax.Array, int], jax.Array], bool]] = {
    "all-gather": (lambda x: lax.all_gather(x, "members", tiled=True), lambda y, g: y[: y.size // g], False),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "members", tiled=True),
        lambda y, g: jnp.tile(y, g) / g,
        True,
    ),
    "all-reduce": (lambda x: lax.psum(x, "members"), lambda y, g: y / g, True),
    "all-to-all": (lambda x: lax.all_to_all(x, "members", 0, 0, tiled=True), lambda y, g: y, True),
}


def collective_rates() -> tuple[MeasuredCollective, ...]:
    """Every kind among 2, 4, 8, ... local devices; none where there is one.

    Simulated CPU devices share their host: of them the bytes of all devices together are given.
    """
    devices = jax.local_devices()
    sizes = [size for size in (2**power for power in range(1, 11)) if len(devices) % size == 0]
    together = len(devices) if devices[0].platform == "cpu" else 1
    return tuple(_measured(kind, size, together) for kind in KINDS for size in sizes)


def _measured(kind: str, size: int, together: int) -> MeasuredCollective:
    sent = wire_bytes(kind, size, LARGE_BYTES) - wire_bytes(kind, size, SMALL_BYTES)
    beyond = _seconds(kind, size, LARGE_BYTES, 0) - _seconds(kind, size, SMALL_BYTES, 0)
    chains = [_seconds(kind, size, SMALL_BYTES, links) for links in (SHORT_CHAIN, LONG_CHAIN)]
    return MeasuredCollective(
        kind=kind,
        group_size=size,
        bytes_per_second=together * sent / max(beyond, LEAST_SECONDS),
        latency_seconds=max(chains[1] - chains[0], LEAST_SECONDS) / (LONG_CHAIN - SHORT_CHAIN),
    )


def wire_bytes(kind: str, size: int, num_bytes: int) -> float:
    """What one of `size` devices sends for a whole array of `num_bytes`."""
    return (2 if kind == "all-reduce" else 1) * num_bytes * (size - 1) / size


def _seconds(kind: str, size: int, num_bytes: int, links: int) -> float:
    """Of one message, or of a chain of `links` messages."""
    devices = jax.local_devices()
    mesh = Mesh([devices[at : at + size] for at in range(0, len(devices), size)], ("groups", "members"))
    collective, back, takes_whole = KINDS[kind]

    def run(x: jax.Array) -> jax.Array:
        for _ in range(links):
            x = back(collective(x), size)
        return x if links else collective(x)

    parts = num_bytes // ITEM_BYTES * (len(devices) if takes_whole else len(devices) // size)
    argument = jax.device_put(jnp.ones(parts), NamedSharding(mesh, SPLIT))
    spread = jax.shard_map(run, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    return best_seconds(spread, (argument,))
