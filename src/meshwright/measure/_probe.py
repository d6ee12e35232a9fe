"""Measure the attached device: `python -m meshwright.measure._probe OUT.json [--detailed]`.

This takes four to eight seconds on a CPU, and half a minute in detail. In detail a CPU is eight simulated
devices. A measurement is the shortest of several runs of a compiled program, each until its result is ready.
It is repeated in rounds until the two best agree.

* FLOP/s: a square product of 1536 (8192 on an accelerator), in float32 and in bfloat16.
* Bytes per second: fused elementwise kernels as a train step has them, each on arrays of 12.6 MB: exact GELU
  and its gradient, a softmax over rows of 256, RMSNorm, AdamW's update in place. The rate is all bytes read
  and written over all seconds. On a CPU such kernels are bound by their arithmetic. A plain copy is several
  times as fast there, and says nothing about a step.
* Launch: a chain of products of 8 x 8, whose arithmetic is negligible. The time of a chain with 192 fewer
  links is subtracted, so that the start of the program cancels. In detail also on several simulated devices
  at once, which share the cores.
* In detail also: attention and collectives (`_probe_kernels`), and products of several sizes and a copy,
  which are shown but not used.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..compiler import installed_versions
from ..hardware import Calibration, chip_of_device_kind
from ._calibration import busy_share, describe_host
from ._probe_kernels import attention_rates, best_seconds, collective_rates, details, steady

SQUARE = 1536
ACCELERATOR_SQUARE = 8192
ROWS, COLUMNS = 2048, 1536
SHORT_CHAIN, LONG_CHAIN = 64, 256
SIMULATED_DEVICES = 8
FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
Args = tuple[Any, ...]


def probe(*, detailed: bool = False) -> Calibration:
    """Return the rates of this host's CPU, all cores together, or of the first accelerator.

    Raises:
        InputError: the catalog does not know the accelerator.
    """
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    where = describe_host() if on_cpu else str(device.device_kind)
    load = busy_share()
    products = {
        name: steady(functools.partial(_matmul_flops_per_second, dtype), max)
        for name, dtype in FORMATS.items()
    }
    memory, launch = steady(_fused_bytes_per_second, max), steady(_launch_seconds, min)
    spread = {f"large product in {name}": share for name, (_, share) in products.items()}
    return Calibration(
        matmul_flops_per_second={name: rate for name, (rate, _) in products.items()},
        memory_bytes_per_second=memory[0],
        launch_seconds=launch[0],
        spread={**spread, "memory": memory[1], "launch": launch[1]},
        load=max(load, busy_share()),
        jaxlib=installed_versions()["jaxlib"],
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        source=f"probe on {where}, jaxlib {installed_versions()['jaxlib']}",
        chip="CPU" if on_cpu else chip_of_device_kind(device.device_kind).name,
        launch_seconds_among=_launch_seconds_among() if detailed else {},
        attention=attention_rates() if detailed else (),
        collectives=collective_rates() if detailed else (),
        details=details() if detailed else {},
    )


def _matmul_flops_per_second(dtype: Any, size: int | None = None) -> float:
    on_cpu = jax.local_devices()[0].platform == "cpu"
    size = size or (SQUARE if on_cpu else ACCELERATOR_SQUARE)
    square = jnp.full((size, size), 1e-3, dtype)
    return 2 * size**3 / best_seconds(jnp.matmul, (square, square))


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_gradient(x: jax.Array, gradient: jax.Array) -> jax.Array:
    return jax.vjp(_gelu, x)[1](gradient)[0]


def _rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def _adamw(
    parameter: jax.Array, first: jax.Array, second: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    first = 0.9 * first + 0.1 * gradient
    second = 0.99 * second + 0.01 * gradient * gradient
    update = first / (jnp.sqrt(second) + 1e-8) + 0.1 * parameter
    return parameter - 1e-3 * update, first, second


def _fused_bytes_per_second() -> float:
    def normal(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape)

    x, gradient = normal(0, ROWS, COLUMNS), normal(1, ROWS, COLUMNS)
    scores = normal(2, ROWS * COLUMNS // 256, 256)
    state = (normal(3, ROWS, COLUMNS), jnp.zeros_like(x), jnp.ones_like(x), gradient)
    num_bytes = x.nbytes
    kernels: list[tuple[Callable[..., Any], Args, int]] = [  # function, arguments, arrays read and written
        (_gelu, (x,), 2),
        (_gelu_gradient, (x, gradient), 3),
        (jax.nn.softmax, (scores,), 2),
        (_rms_norm, (x,), 2),
    ]
    seconds = sum(best_seconds(function, arguments) for function, arguments, _ in kernels)
    seconds += best_seconds(_adamw, state, in_place=True)
    return num_bytes * (sum(arrays for _, _, arrays in kernels) + 7) / seconds


def _launch_seconds(num_devices: int = 1) -> float:
    """Return the seconds of one launch on each of several devices at once."""
    mesh = jax.make_mesh((num_devices,), ("devices",), devices=jax.local_devices()[:num_devices])
    split = PartitionSpec("devices")
    argument = jax.device_put(jnp.tile(jnp.eye(8), (num_devices, 1)), NamedSharding(mesh, split))

    def chain(links: int) -> float:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(links):
                x = x @ x
            return x

        return best_seconds(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split), (argument,))

    # The clock ticks in nanoseconds; a difference that noise turned negative counts as one tick.
    return max(chain(LONG_CHAIN) - chain(SHORT_CHAIN), 1e-9) / (LONG_CHAIN - SHORT_CHAIN)


def _launch_seconds_among() -> dict[int, float]:
    """Return launch seconds by number of simulated devices; accelerators launch separately and have none."""
    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        return {}
    return {count: _launch_seconds(count) for count in (2, 4, 8, 16) if count <= len(devices)}


def main(arguments: list[str]) -> None:
    """Measure and write the result; in detail a CPU is measured as several simulated devices."""
    detailed = "--detailed" in arguments
    if detailed and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
    Path(arguments[0]).write_text(probe(detailed=detailed).to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
