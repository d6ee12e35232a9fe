"""Plant a cause in a step, trace it with jax's profiler, and find it; in unplanted steps find none."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from tests.contrib.causes.steps import (
    NAP,
    ROWS,
    arguments,
    gathered,
    make,
    slow_batches,
    traced,
    uneven,
    wait,
)

pytestmark = pytest.mark.program  # names inside of programs are compared
MOST_BLAMED = 0.1  # of an unplanted step


@pytest.fixture(scope="module")
def reconciled() -> Callable[[Path, int], mw.Gap]:
    """Reconcile a trace with the step as it is meant to be."""

    def reconciled(trace: Path, num_devices: int = 1) -> mw.Gap:
        meant = mw.jax_step(jax.jit(make()), *arguments(num_devices))
        return mw.reconcile(meant, on=f"{num_devices}xCPU", trace=trace)

    return reconciled


def _sleeps(folder: Path) -> Path:
    def after(index, w, value):
        wait(index, w, value)
        time.sleep(NAP)

    return traced(folder, make(), after=after)


def _calls_the_host(folder: Path) -> Path:
    def on_host(gradient):
        time.sleep(NAP)
        return np.asarray(gradient)

    def on_gradient(g):
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(g.shape, g.dtype), g)

    return traced(folder, make(on_gradient=on_gradient))


def _copies(folder: Path) -> Path:
    def after(index, w, value):
        wait(index, w, value)
        for _ in range(100):
            np.array(w)

    return traced(folder, make(), after=after)


def _compiles_again(folder: Path) -> Path:
    return traced(folder, make(), steps=3, before=lambda index, x: x[: ROWS - 8 * index])


def _computes_wide(folder: Path) -> Path:
    def multiply(h, w):
        return (h.astype(jnp.float64) @ w.astype(jnp.float64)).astype(jnp.float32)

    with jax.enable_x64(True):
        return traced(folder, make(multiply=multiply))


def _recomputes(folder: Path) -> Path:
    return traced(folder, make(wrap=jax.checkpoint))


def _reads_slowly(folder: Path) -> Path:
    read = iter(slow_batches(arguments(1)[1]))
    return traced(folder, make(), before=lambda index, x: next(read))


def _differs_sometimes(folder: Path) -> Path:
    def look(w):
        time.sleep(2 * NAP)

    def after(index, w, value):
        wait(index, w, value)
        if index % 4 == 1:
            look(w)

    return traced(folder, make(), steps=9, after=after)


def _runs_small_programs(folder: Path) -> Path:
    def after(index, w, value):
        wait(index, w, value)
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


PLANTED = {
    _sleeps: ("host", "test_planted_causes.py"),
    _calls_the_host: ("callback", "test_planted_causes.py"),
    _copies: ("copy", "test_planted_causes.py"),
    _compiles_again: ("compilation", "test_planted_causes.py"),
    _computes_wide: ("wide product", "test_planted_causes.py"),
    _recomputes: ("recomputation", "steps.py"),
    _reads_slowly: ("input", "steps.py"),
    _differs_sometimes: ("differing steps", "test_planted_causes.py"),
    _runs_small_programs: ("small programs", "test_planted_causes.py"),
    _works_more: ("extra work", "test_planted_causes.py"),
    _sends_more: ("extra message", "steps.py"),
    _has_a_slow_device: ("straggler", ""),
}


SLOW = (_compiles_again, _works_more, _differs_sometimes)  # to compile, or to wait for


@pytest.mark.parametrize(
    "plant",
    [pytest.param(plant, marks=pytest.mark.wide if plant in SLOW else ()) for plant in PLANTED],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_a_planted_cause_is_named_first_or_second(plant, reconciled, tmp_path):
    kind, file = PLANTED[plant]
    gap = reconciled(plant(tmp_path), 4 if plant in (_sends_more, _has_a_slow_device) else 1)
    named = {cause.kind: cause for cause in gap.causes[:2]}
    assert kind in named, [(cause.kind, cause.seconds) for cause in gap.causes]
    assert named[kind].where.startswith(file)
    assert named[kind].cure
    if plant in (_sleeps, _calls_the_host, _reads_slowly, _compiles_again):  # most of the step by far
        assert named[kind].seconds > gap.measured_seconds / 3
    assert sum(cause.seconds for cause in gap.causes) + gap.unexplained_seconds == pytest.approx(
        gap.gap_seconds, rel=1e-9
    )


def _is_awaited(folder: Path) -> Path:
    return traced(folder, make())


def _is_not_awaited(folder: Path) -> Path:
    return traced(folder, make(), after=lambda index, w, value: None, annotated=False)


def _runs_on_four(folder: Path) -> Path:
    return traced(folder, make(), 4)


@pytest.mark.parametrize(
    "run", [_is_awaited, _is_not_awaited, _runs_on_four], ids=lambda run: run.__name__.strip("_")
)
def test_nothing_is_blamed_in_an_unplanted_run(run, reconciled, tmp_path):
    """A busy machine may pause a step, which is blamed rightly: not in each of three traces."""
    blamed: list[object] = []
    for place in range(3):
        gap = reconciled(run(tmp_path / str(place)), 4 if run is _runs_on_four else 1)
        assert gap.same_program is True
        assert gap.matched == 1.0
        if all(cause.seconds < MOST_BLAMED * gap.measured_seconds for cause in gap.causes):
            return
        blamed.append(gap.causes)
    pytest.fail(f"{blamed}")
