"""Programs that call the host are weighed as they run, and what the host does is said to be in no figure."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.compiler import read_text

WIDTH, ROWS = 128, 64
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
FORWARD = 2 * ROWS * WIDTH * WIDTH


def loss(w, rows, ordered):
    y = jnp.tanh(rows @ w)
    jax.debug.print("scores {}", jnp.sum(y @ y.T), ordered=ordered)
    return jnp.mean(y**2)


def step(w, rows, *, ordered):
    value, gradient = jax.value_and_grad(loss)(w, rows, ordered)
    scale = jax.pure_callback(lambda v: np.float32(v), SCALAR, value)
    given = io_callback(np.asarray, jax.ShapeDtypeStruct(w.shape, w.dtype), w, ordered=ordered)
    jax.debug.callback(lambda v: None, value)
    return given @ w - scale * gradient


def program(mesh):
    """Return the step and its arguments as a program that is weighed by its name."""
    split = NamedSharding(mesh, PartitionSpec("data"))
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=split)
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=split)
    return jax.jit(lambda w, rows: step(w, rows, ordered=False)), (w, rows)


# The prints' product, the loss and its gradient, and the product with what the host returned.
PRODUCTS = 2 * ROWS * ROWS * WIDTH + 2 * FORWARD + 2 * WIDTH**3
SAID = {"debug_print", "pure_callback", "io_callback"}


def check(weighed):
    assert weighed.ledger.flops.model == PRODUCTS
    # The operands of a call are computed, and its results are used: by each device, as they are whole.
    assert weighed.ledger.flops.executed >= PRODUCTS
    assert weighed.ledger.unpriced == ()
    said = [text for text in weighed.ledger.assumptions if "calls the host" in text]
    assert {text.split()[0] for text in said} >= SAID
    assert all("in no figure" in text for text in said)


@pytest.mark.parametrize("fleet", ["8xH100", "8xCPU"])
def test_a_live_function_with_every_kind_of_call_is_weighed_on_an_abstract_mesh(fleet, forked_workers):
    jitted, arguments = program(AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)))
    check(mw.weigh(mw.jax_step(jitted, *arguments), on=fleet))


@pytest.mark.parametrize("fleet", ["8xH100", "8xCPU"])
def test_a_function_by_name_may_call_the_host(fleet, monkeypatch, tmp_path, forked_workers):
    (tmp_path / "calling.py").write_text(Path(__file__).read_text())
    monkeypatch.chdir(tmp_path)
    check(mw.weigh("calling:program", on=fleet))


def test_ordered_calls_are_calls_of_the_target(forked_workers):
    def ordered(w, rows):
        return step(w, rows, ordered=True)

    arguments = (jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    weighed = mw.weigh(mw.jax_step(ordered, *arguments), on="1xH100")
    check(weighed)
    assert weighed.ledger.flops.executed == PRODUCTS
    text = read_text(weighed.folder, "program.hlo.txt")
    assert text.count('custom_call_target="xla_ffi_python_gpu_callback"') == 4


def test_the_rules_hold_for_one_lowering_only(forked_workers):
    jitted, arguments = program(AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)))
    mw.weigh(mw.jax_step(jitted, *arguments), on="8xH100")
    another, _ = program(AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)))
    with pytest.raises(ValueError, match="require devices"):
        another.trace(*arguments).lower(lowering_platforms=("cuda",))


def test_a_program_that_was_weighed_for_this_machine_still_calls_the_host(forked_workers):
    called = []

    @jax.jit
    def calling(rows):
        jax.debug.callback(lambda value: called.append(float(value)), jnp.sum(rows))
        return rows + 1

    mw.weigh(mw.jax_step(calling, jnp.ones(3)), on="1xCPU")
    calling(jnp.ones(3))
    jax.effects_barrier()
    assert called == [3.0]
