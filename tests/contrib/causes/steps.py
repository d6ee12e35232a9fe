"""A small step, and ways to make it slow: what `test_planted_causes` traces, as a user's program would be."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

WIDTH, LAYERS, ROWS = 192, 3, 192
NAP = 0.02  # seconds
Step = Callable[[Any, Any], tuple[Any, Any]]


def same(value: Any) -> Any:
    """Return what is given."""
    return value


def product(h: Any, w: Any) -> Any:
    """Return the product of a layer."""
    return h @ w


def make(
    wrap: Callable[[Any], Any] = same,
    after_layer: Callable[[Any], Any] = same,
    on_gradient: Callable[[Any], Any] = same,
    multiply: Callable[[Any, Any], Any] = product,
) -> Step:
    """Return a step: layers in a scan, their gradient, and an update. Each argument changes it somewhere."""

    def loss(w: Any, x: Any) -> Any:
        def body(h: Any, layer: Any) -> tuple[Any, None]:
            return after_layer(jnp.tanh(multiply(h, layer))), None

        h, _ = jax.lax.scan(wrap(body), x, w)
        return (h**2).mean()

    def step(w: Any, x: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * on_gradient(gradient), value

    return step


def arguments(num_devices: int) -> tuple[Any, Any]:
    """Return weights on each device, and rows that are split among them."""
    generator = np.random.default_rng(0)
    w = generator.standard_normal((LAYERS, WIDTH, WIDTH), dtype=np.float32) / 14
    x = generator.standard_normal((ROWS, WIDTH), dtype=np.float32)
    mesh = mesh_of(num_devices)
    split = NamedSharding(mesh, PartitionSpec("data"))
    return jax.device_put(w, NamedSharding(mesh, PartitionSpec())), jax.device_put(x, split)


def mesh_of(num_devices: int) -> jax.sharding.Mesh:
    """Return a mesh of one axis."""
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def wait(index: int, w: Any, value: Any) -> None:
    """Wait for a step, as a loop does that shows its loss."""
    jax.block_until_ready(value)


def traced(
    folder: Path,
    step: Step,
    num_devices: int = 1,
    steps: int = 5,
    before: Callable[[int, Any], Any] = lambda index, x: x,
    after: Callable[[int, Any, Any], None] = wait,
    annotated: bool = True,
) -> Path:
    """Run some steps under jax's profiler, and return the folder of the trace."""
    w, x = arguments(num_devices)
    step = jax.jit(step)
    for _ in range(2):
        w, value = step(w, before(0, x))
        after(0, w, value)
    jax.block_until_ready(w)
    with jax.profiler.trace(str(folder)):
        for index in range(steps):
            named = jax.profiler.StepTraceAnnotation("train", step_num=index)
            with named if annotated else contextlib.nullcontext():
                w, value = step(w, before(index, x))
                after(index, w, value)
        jax.block_until_ready(w)
    return folder


def slow_batches(x: Any) -> Iterator[Any]:
    """Yield batches, each after a while."""
    while True:
        time.sleep(NAP)
        yield x


def uneven(num_devices: int) -> Callable[[Any], Any]:
    """Return a layer on which the second device works longer than the others."""

    def long(x: Any) -> Any:
        return jax.lax.fori_loop(0, 400, lambda _, value: jnp.sin(value) + jnp.cos(value), x)

    def layer(x: Any) -> Any:
        return jax.lax.cond(jax.lax.axis_index("data") == 1, long, same, x)

    spec = PartitionSpec("data")
    return jax.shard_map(layer, mesh=mesh_of(num_devices), in_specs=spec, out_specs=spec)


def gathered(num_devices: int) -> Callable[[Any], Any]:
    """Return a layer whose result every device holds whole for a moment."""
    mesh = mesh_of(num_devices)
    whole, split = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), ("data",)))
    constrain = jax.lax.with_sharding_constraint
    return lambda h: constrain(constrain(h, whole) * 1.5, split)
