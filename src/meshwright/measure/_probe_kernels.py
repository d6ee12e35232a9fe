"""Time the programs of `_probe`: attention, collectives, and rates that depend on size. Imports jax.

`steady` repeats a measurement in rounds until the two best agree; `best_seconds` takes the shortest of
several runs. Attention is a fused kernel on a GPU; its backward time is what a gradient takes beyond the
forward pass. Collectives are measured by kind and group size. All local devices take part in each, in
disjoint groups side by side, as in a step.

* Latency: a chain of small messages, each of which needs the previous one. The time of a shorter chain is
  subtracted, so that the start of the program cancels.
* Bytes per second: the additional time of a large message over a small one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..hardware import MeasuredAttention, MeasuredCollective

REPEATS = 10
FEWEST_ROUNDS, MOST_ROUNDS = 2, 6
MOST_SECONDS = 10.0  # of one rate's rounds: on a busy machine, better a wide spread than a long wait
AGREES = 0.05  # equals `steady_spread` in predict/runs.toml


def steady(measure: Callable[[], float], better: Callable[[Iterable[float]], float]) -> tuple[float, float]:
    """Measure in rounds until the two best agree within 5 %, for at most six rounds or ten seconds.

    Other work on the machine comes and goes. It makes a round worse, never better.

    Args:
        better: `max` for a rate, `min` for a time.

    Returns:
        The best round, and its relative distance from the second best.
    """
    rounds: list[float] = []
    started = time.monotonic()
    while True:
        rounds.append(measure())
        if len(rounds) < FEWEST_ROUNDS:
            continue
        best = better(rounds)
        second = better([*rounds[: rounds.index(best)], *rounds[rounds.index(best) + 1 :]])
        spread = max(best, second) / min(best, second) - 1
        late = time.monotonic() - started > MOST_SECONDS
        if spread <= AGREES or len(rounds) == MOST_ROUNDS or late:
            return best, spread


def best_seconds(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, in_place: bool = False
) -> float:
    """Return the shortest of several runs; if `in_place`, results replace all arguments but the last."""
    donated = tuple(range(len(arguments) - 1)) if in_place else ()
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        best = min(best, time.perf_counter() - started)
        if in_place:
            arguments = (*results, arguments[-1])
    return best


LENGTHS = (1024, 4096, 16384)
HEAD_SIZES = (64, 128)
HEADS, TOKENS = 8, 16384  # per launch: enough to fill a device
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # the backward kernel recomputes the scores
LEAST_SECONDS = 1e-9  # the clock's tick; replaces a difference that noise turned negative


def attention_rates() -> tuple[MeasuredAttention, ...]:
    """Return the rates of cuDNN's kernel on a GPU; empty elsewhere, where attention is several kernels."""
    if jax.local_devices()[0].platform != "gpu":
        return ()
    return tuple(
        measured(head, length, TOKENS // length, "cudnn") for head in HEAD_SIZES for length in LENGTHS
    )


def measured(head_size: int, length: int, sequences: int, implementation: Any) -> MeasuredAttention:
    """Measure causal attention in bf16; the FLOPs count only the half of the scores that is needed."""
    queries = jnp.full((sequences, length, HEADS, head_size), 1e-2, jnp.bfloat16)

    def attend(x: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation=implementation)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda q: attend(q).astype(jnp.float32).sum())(x)

    # Half of the scores are needed, and a multiply-add counts as two.
    product = sequences * length * length * HEADS * head_size
    forward, both = best_seconds(attend, (queries,)), best_seconds(gradient, (queries,))
    return MeasuredAttention(
        head_size=head_size,
        length=length,
        forward_flops_per_second=FORWARD_PRODUCTS * product / forward,
        backward_flops_per_second=BACKWARD_PRODUCTS * product / max(both - forward, LEAST_SECONDS),
    )


LARGE_BYTES, SMALL_BYTES = 2**24, 2**12  # of the whole array
SHORT_CHAIN, LONG_CHAIN = 2, 10
ITEM_BYTES = 4
Local = Callable[[jax.Array], jax.Array]
SPLIT = PartitionSpec(("groups", "members"))

# On one device: the collective, the function that turns its result into an argument again, and true if the
# argument is the whole array (false: this device's shard).
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
    """Measure every kind among 2, 4, 8, ... local devices; empty if there is only one.

    Simulated CPU devices share their host, so their rate is the bytes of all devices together.
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
    """Return the bytes that one of `size` devices sends for a whole array of `num_bytes`."""
    return (2 if kind == "all-reduce" else 1) * num_bytes * (size - 1) / size


def _seconds(kind: str, size: int, num_bytes: int, links: int) -> float:
    """Time one message, or a chain of `links` messages if `links` is positive."""
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


FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
SIZES = {"cpu": (128, 512, 1024), "other": (512, 1024, 2048, 4096, 8192)}
CPU_LENGTHS = (256, 1024)  # on a CPU; `attention_rates` measures a GPU's fused kernel
HEAD_SIZE = 64
COPIED_BYTES = 2**26


def details() -> dict[str, float]:
    """Return rates of the first device by name with unit, for `meshwright probe` to show.

    Predictions do not use them.
    """
    platform = jax.local_devices()[0].platform
    kind = "cpu" if platform == "cpu" else "other"
    found: dict[str, float] = {}
    for name, dtype in FORMATS.items():
        for size in SIZES[kind]:
            square = jnp.full((size, size), 1e-3, dtype)
            seconds = best_seconds(jnp.matmul, (square, square))
            found[f"matmul {name} {size}, FLOP/s"] = 2 * size**3 / seconds
    if platform == "cpu":
        for length in CPU_LENGTHS:
            found |= _attention(length)
    copied = jnp.zeros(COPIED_BYTES // 4)
    found[f"copy of {COPIED_BYTES // 2**20} MiB, bytes/s"] = (
        2 * COPIED_BYTES / best_seconds(lambda x: x + 1, (copied,))
    )
    return found


def _attention(length: int) -> dict[str, float]:
    """Measure causal attention as several kernels, each of which a prediction prices separately."""
    rates = measured(HEAD_SIZE, length, 1, "xla")
    return {
        f"attention {length}, FLOP/s": rates.forward_flops_per_second,
        f"gradient of attention {length}, FLOP/s": rates.backward_flops_per_second,
    }
