"""Plant causes in a small step of JAX, and trace it with jax's profiler, as a user's program would be."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _planted import NAP, Clock
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright as mw

WIDTH, LAYERS, ROWS = 192, 3, 192
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


def wait(value: Any) -> None:
    """Wait for a step, as a loop does that shows its loss."""
    jax.block_until_ready(value)


def traced(
    folder: Path,
    step: Step,
    num_devices: int = 1,
    *,
    steps: int = 5,
    before: Callable[[int, Any], Any] | None = None,
    after: Callable[[int, Any, Any], None] | None = None,
    awaited: bool = True,
) -> Path:
    """Run some steps under jax's profiler, and return the folder of the trace.

    `before` makes the rows of a step, `after` is called when it is done: neither is there in the meant step.
    """
    w, x = arguments(num_devices)
    step, clock = jax.jit(step), Clock()

    def run(index: int, w: Any) -> Any:
        w, value = step(w, x if before is None else clock(before, index, x))
        if awaited:
            wait(value)
        clock(after, index, w, value)
        return w

    for _ in range(2):
        w = run(0, w)
    jax.block_until_ready(w)
    clock.start()
    with jax.profiler.trace(str(folder)):
        for index in range(steps):
            named = jax.profiler.StepTraceAnnotation("train", step_num=index)
            with named if awaited else contextlib.nullcontext():
                w = run(index, w)
        jax.block_until_ready(w)
    clock.write(folder, steps)
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


def _sleeps(folder: Path) -> Path:
    return traced(folder, make(), after=lambda index, w, value: time.sleep(NAP))


def _calls_the_host(folder: Path) -> Path:
    def on_host(gradient: Any) -> Any:
        time.sleep(NAP)
        return np.asarray(gradient)

    def on_gradient(g: Any) -> Any:
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(g.shape, g.dtype), g)

    return traced(folder, make(on_gradient=on_gradient))


def _copies(folder: Path) -> Path:
    def after(index: int, w: Any, value: Any) -> None:
        for _ in range(100):
            np.array(w)

    return traced(folder, make(), after=after)


def _compiles_again(folder: Path) -> Path:
    return traced(folder, make(), steps=3, before=lambda index, x: x[: ROWS - 8 * index])


def _computes_wide(folder: Path) -> Path:
    def multiply(h: Any, w: Any) -> Any:
        return (h.astype(jnp.float64) @ w.astype(jnp.float64)).astype(jnp.float32)

    with jax.enable_x64(True):
        return traced(folder, make(multiply=multiply))


def _recomputes(folder: Path) -> Path:
    return traced(folder, make(wrap=jax.checkpoint))


def _reads_slowly(folder: Path) -> Path:
    read = iter(slow_batches(arguments(1)[1]))
    return traced(folder, make(), before=lambda index, x: next(read))


def _differs_sometimes(folder: Path) -> Path:
    def look(w: Any) -> None:
        time.sleep(2 * NAP)

    def after(index: int, w: Any, value: Any) -> None:
        if index % 4 == 1:
            look(w)

    return traced(folder, make(), steps=9, after=after)


def _runs_small_programs(folder: Path) -> Path:
    def after(index: int, w: Any, value: Any) -> None:
        for _ in range(100):
            value = value * 0.9 + 1.0
        value.block_until_ready()

    return traced(folder, make(), after=after)


def _works_more(folder: Path) -> Path:
    return traced(folder, make(after_layer=lambda h: h + 1e-6 * jnp.sort(h, axis=-1)))


def _sends_more(folder: Path) -> Path:
    return traced(folder, make(after_layer=gathered(4)), 4)


def _has_a_slow_device(folder: Path) -> Path:
    step, slow = make(), uneven(4)
    return traced(folder, lambda w, x: step(w, slow(x)), 4)


TRACED: Mapping[str, Callable[[Path], Path]] = {
    "a sleep": _sleeps,
    "a function of the host": _calls_the_host,
    "copies to the host": _copies,
    "other shapes": _compiles_again,
    "fp64": _computes_wide,
    "recomputation": _recomputes,
    "a slow loader": _reads_slowly,
    "a pause of some steps": _differs_sometimes,
    "small programs": _runs_small_programs,
    "a sort in each layer": _works_more,
    "a gather in each layer": _sends_more,
    "a slow device": _has_a_slow_device,
    "nothing": lambda folder: traced(folder, make()),
    "nothing, not awaited": lambda folder: traced(folder, make(), awaited=False),
    "nothing, on four devices": lambda folder: traced(folder, make(), 4),
}


def jax_gap(trace: Path, num_devices: int) -> mw.Gap:
    """Reconcile a trace with the step as it is meant to be."""
    meant = mw.jax_step(jax.jit(make()), *arguments(num_devices))
    return mw.reconcile(meant, on=f"{num_devices}xCPU", trace=trace)
