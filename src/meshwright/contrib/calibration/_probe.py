"""Measure the attached device: `python -m meshwright.contrib.calibration._probe OUT.json [--detailed]`.

This takes four to eight seconds on a CPU, and half a minute in detail. In detail a CPU is eight simulated
devices. A measurement is the shortest of several runs of a compiled program, each until its result is ready.
On an accelerator a run is as many launches as take 20 ms, one behind the other, so that the host's time for
each is hidden. It is repeated in rounds until the two best agree.

* FLOP/s: a square product of 1536 (8192 on an accelerator), in float32 and in bfloat16.
* Bytes per second: fused elementwise kernels as a train step has them, each on arrays of 12.6 MB (403 MB on
  an accelerator, many times its caches): exact GELU and its gradient, a softmax over rows of 256, RMSNorm,
  AdamW's update in place. The rate is all bytes read and written over all seconds. On a CPU such kernels are
  bound by their arithmetic. A plain copy is several times as fast there, and says nothing about a step.
* Launch: a chain of products of 8 x 8, whose arithmetic is negligible. The time of a chain with 192 fewer
  links is subtracted, so that the start of the program cancels. In detail also on several simulated devices
  at once, which share the cores.
* In detail, attention: a fused kernel on a GPU. Its backward time is the time that a gradient takes beyond
  the forward pass.
* In detail, collectives by kind and group size. All local devices take part in each, in disjoint groups side
  by side, as in a step. Latency comes from a chain of small messages, each of which needs the previous one,
  minus a shorter chain. Bytes per second come from the additional time of a large message over a small one.
* In detail, products of several sizes and a copy, which are shown but not used.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.compiler import installed_versions
from meshwright.hardware import Calibration, MeasuredAttention, MeasuredCollective, chip_of_device_kind
from meshwright.measure import busy_share, describe_host

FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
SQUARE, ACCELERATOR_SQUARE = 1536, 8192
ROWS, ACCELERATOR_ROWS, COLUMNS = 2048, 65_536, 1536
LAUNCH_CHAINS = (64, 256)  # links of the short and the long chain
SIMULATED_DEVICES = 8
ACCELERATOR_RUN_SECONDS = 0.02
LEAST_SECONDS = 1e-9  # the clock's tick; replaces a difference that noise turned negative

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
        ranked = sorted(rounds, reverse=better is max)
        spread = max(ranked[:2]) / min(ranked[:2]) - 1
        late = time.monotonic() - started > MOST_SECONDS
        if spread <= AGREES or len(rounds) == MOST_ROUNDS or late:
            return ranked[0], spread


def best_seconds(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, in_place: bool = False
) -> float:
    """Return the seconds of a launch in the shortest of several runs.

    Args:
        in_place: whether the results replace all arguments but the last.
    """
    donated = tuple(range(len(arguments) - 1)) if in_place else ()
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    best, launches = float("inf"), 1
    for _ in range(REPEATS):
        started = time.perf_counter()
        results: Any = ()
        for _ in range(launches):
            results = compiled(*arguments)
            if in_place:
                arguments = (*results, arguments[-1])
        jax.block_until_ready(results)
        seconds = (time.perf_counter() - started) / launches
        best = min(best, seconds)
        if jax.local_devices()[0].platform != "cpu":
            launches = max(1, round(ACCELERATOR_RUN_SECONDS / seconds))
    return best


def probe(*, detailed: bool = False) -> Calibration:
    """Return the rates of this host's CPU, all cores together, or of the first accelerator.

    Raises:
        InputError: the catalog does not know the accelerator.
    """
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    where = describe_host() if on_cpu else str(device.device_kind)
    size = SQUARE if on_cpu else ACCELERATOR_SQUARE
    load = busy_share()
    products = {
        name: steady(functools.partial(matmul_flops_per_second, dtype, size), max)
        for name, dtype in FORMATS.items()
    }
    memory, launch = steady(fused_bytes_per_second, max), steady(launch_seconds, min)
    spread = {f"large product in {name}": share for name, (_, share) in products.items()}
    jaxlib = installed_versions()["jaxlib"]
    return Calibration(
        matmul_flops_per_second={name: rate for name, (rate, _) in products.items()},
        memory_bytes_per_second=memory[0],
        launch_seconds=launch[0],
        spread={**spread, "memory": memory[1], "launch": launch[1]},
        load=max(load, busy_share()),
        jaxlib=jaxlib,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        source=f"probe on {where}, jaxlib {jaxlib}",
        chip="CPU" if on_cpu else chip_of_device_kind(device.device_kind).name,
        launch_seconds_among=launch_seconds_by_devices() if detailed else {},
        attention=attention_rates() if detailed else (),
        collectives=collective_rates() if detailed else (),
        details=details() if detailed else {},
    )


def matmul_flops_per_second(dtype: Any, size: int) -> float:
    """Measure one square product of `size`, of random numbers: a GPU multiplies equal ones faster."""
    square = normal(0, size, size).astype(dtype)
    return 2 * size**3 / best_seconds(jnp.matmul, (square, square))


def normal(seed: int, *shape: int) -> jax.Array:
    """Return normally distributed numbers in float32."""
    return jax.random.normal(jax.random.key(seed), shape)


def gelu(x: jax.Array) -> jax.Array:
    """Return the exact GELU."""
    return jax.nn.gelu(x, approximate=False)


def gelu_gradient(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return the gradient at GELU's input from that at its output."""
    return jax.vjp(gelu, x)[1](gradient)[0]


def rms_norm(x: jax.Array) -> jax.Array:
    """Divide each row by its root mean square."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def adamw(
    parameter: jax.Array, first: jax.Array, second: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the parameter and both moments after one update of AdamW, late in a run."""
    first = 0.9 * first + 0.1 * gradient
    second = 0.99 * second + 0.01 * gradient * gradient
    update = first / (jnp.sqrt(second) + 1e-8) + 0.1 * parameter
    return parameter - 1e-3 * update, first, second


def fused_bytes_per_second() -> float:
    """Measure bytes read and written over seconds, for the elementwise kernels of a train step together."""
    rows = ROWS if jax.local_devices()[0].platform == "cpu" else ACCELERATOR_ROWS
    x, gradient = normal(0, rows, COLUMNS), normal(1, rows, COLUMNS)
    scores = normal(2, rows * COLUMNS // 256, 256)
    state = (normal(3, rows, COLUMNS), jnp.zeros_like(x), jnp.ones_like(x), gradient)
    kernels: list[tuple[Callable[..., Any], tuple[Any, ...], int]] = [
        # function, arguments, number of arrays read and written
        (gelu, (x,), 2),
        (gelu_gradient, (x, gradient), 3),
        (jax.nn.softmax, (scores,), 2),
        (rms_norm, (x,), 2),
    ]
    seconds = sum(best_seconds(function, arguments) for function, arguments, _ in kernels)
    seconds += best_seconds(adamw, state, in_place=True)
    return x.nbytes * (sum(arrays for _, _, arrays in kernels) + 7) / seconds


def launch_seconds(num_devices: int = 1) -> float:
    """Measure the seconds of one launch on each of several devices at once."""
    mesh = jax.make_mesh((num_devices,), ("devices",), devices=jax.local_devices()[:num_devices])
    split = PartitionSpec("devices")
    argument = jax.device_put(jnp.tile(jnp.eye(8), (num_devices, 1)), NamedSharding(mesh, split))

    def chain(links: int) -> float:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(links):
                x = x @ x
            return x

        return best_seconds(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split), (argument,))

    short, long = LAUNCH_CHAINS
    return max((chain(long) - chain(short)) / (long - short), LEAST_SECONDS)


def launch_seconds_by_devices() -> dict[int, float]:
    """Measure launches by number of simulated devices; accelerators launch separately and have none."""
    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        return {}
    return {count: launch_seconds(count) for count in (2, 4, 8, 16) if count <= len(devices)}


LENGTHS = (1024, 4096, 16384)
HEAD_SIZES = (64, 128)
HEADS, TOKENS = 8, 65_536  # per launch: enough to fill a device for longer than the host needs to launch
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # the backward kernel recomputes the scores


def attention_rates() -> tuple[MeasuredAttention, ...]:
    """Return the rates of cuDNN's kernel on a GPU; empty elsewhere, where attention is several kernels."""
    if jax.local_devices()[0].platform != "gpu":
        return ()
    shapes = [(head_size, length) for head_size in HEAD_SIZES for length in LENGTHS]
    return tuple(attention_rate(head, length, TOKENS // length, "cudnn") for head, length in shapes)


def attention_rate(head_size: int, length: int, sequences: int, implementation: Any) -> MeasuredAttention:
    """Measure causal attention in bf16; the FLOPs count only the half of the scores that is needed."""
    queries = normal(0, sequences, length, HEADS, head_size).astype(jnp.bfloat16)

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
MESSAGE_CHAINS = (2, 10)  # messages of the short and the long chain
ITEM_BYTES = 4
SPLIT = PartitionSpec(("groups", "members"))

# On one device: the collective, the function that turns its result into an argument again, and true if the
# argument is the whole array (false: this device's shard).
KINDS: dict[str, tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array, int], jax.Array], bool]] = {
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
    return tuple(collective_rate(kind, size, together) for kind in KINDS for size in sizes)


def collective_rate(kind: str, size: int, together: int) -> MeasuredCollective:
    """Measure one collective among groups of `size`, and multiply its bytes by `together`."""
    # One of `size` devices sends (size - 1) / size of the whole array, twice in an all-reduce.
    sent = (2 if kind == "all-reduce" else 1) * (LARGE_BYTES - SMALL_BYTES) * (size - 1) / size
    beyond = message_seconds(kind, size, LARGE_BYTES, 0) - message_seconds(kind, size, SMALL_BYTES, 0)
    short, long = (message_seconds(kind, size, SMALL_BYTES, links) for links in MESSAGE_CHAINS)
    return MeasuredCollective(
        kind=kind,
        group_size=size,
        bytes_per_second=together * sent / max(beyond, LEAST_SECONDS),
        latency_seconds=max((long - short) / (MESSAGE_CHAINS[1] - MESSAGE_CHAINS[0]), LEAST_SECONDS),
    )


def message_seconds(kind: str, size: int, num_bytes: int, links: int) -> float:
    """Time one message, or a chain of `links` messages if `links` is positive."""
    devices = jax.local_devices()
    mesh = Mesh([devices[at : at + size] for at in range(0, len(devices), size)], ("groups", "members"))
    collective, back, takes_whole = KINDS[kind]

    def run(x: jax.Array) -> jax.Array:
        for _ in range(links):
            x = back(collective(x), size)
        return x if links else collective(x)

    elements = num_bytes // ITEM_BYTES * (len(devices) if takes_whole else len(devices) // size)
    argument = jax.device_put(jnp.ones(elements), NamedSharding(mesh, SPLIT))
    return best_seconds(jax.shard_map(run, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT), (argument,))


CPU_SIZES, ACCELERATOR_SIZES = (128, 512, 1024), (512, 1024, 2048, 4096, 8192)
CPU_LENGTHS, CPU_HEAD_SIZE = (256, 1024), 64  # `attention_rates` measures a GPU's fused kernel
COPIED_BYTES = 2**26


def details() -> dict[str, float]:
    """Return rates of the first device by name with unit, for `meshwright probe` to show.

    Predictions do not use them.
    """
    on_cpu = jax.local_devices()[0].platform == "cpu"
    rates = {
        f"matmul {name} {size}, FLOP/s": matmul_flops_per_second(dtype, size)
        for name, dtype in FORMATS.items()
        for size in (CPU_SIZES if on_cpu else ACCELERATOR_SIZES)
    }
    for length in CPU_LENGTHS if on_cpu else ():
        # Attention here is several kernels, which a prediction prices separately.
        rate = attention_rate(CPU_HEAD_SIZE, length, 1, "xla")
        rates[f"attention {length}, FLOP/s"] = rate.forward_flops_per_second
        rates[f"gradient of attention {length}, FLOP/s"] = rate.backward_flops_per_second
    seconds = best_seconds(lambda x: x + 1, (jnp.zeros(COPIED_BYTES // ITEM_BYTES),))
    return {**rates, f"copy of {COPIED_BYTES // 2**20} MiB, bytes/s": 2 * COPIED_BYTES / seconds}


def main(arguments: list[str]) -> None:
    """Measure and write the result; in detail a CPU is measured as several simulated devices."""
    detailed = "--detailed" in arguments
    if detailed and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
    Path(arguments[0]).write_text(probe(detailed=detailed).to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
