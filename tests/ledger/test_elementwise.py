"""Counts beside XLA's own cost analysis, which enters a loop once, and beside counts by hand."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwright.hlo import parse_program
from meshwright.ledger import executions_of
from meshwright.ledger._flops import executed_flops
from meshwright.ledger._rules import CLASSES

ROWS, COLUMNS = 64, 128
WHOLE = ROWS * COLUMNS


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def counted(function, *arguments):
    """What the CPU's program executes by our count, and what XLA's cost analysis says of it."""
    with tempfile.TemporaryDirectory() as dump:
        options = {"xla_dump_to": dump, "xla_dump_hlo_pass_re": "NONE", "xla_dump_hlo_as_text": True}
        compiled = jax.jit(function).lower(*arguments).compile(compiler_options=options)
        text = next(Path(dump).glob("*after_optimizations.txt")).read_text()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    return executed_flops(executions_of(parse_program(text))), analysis


def root_mean_square(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def largest(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")


X = array(ROWS, COLUMNS)
PROGRAMS = {
    "softmax": (jax.nn.softmax, X),
    "gelu": (jax.nn.gelu, X),
    "norm": (root_mean_square, X),
    "pooling": (largest, X),
    "gradient of pooling": (jax.grad(lambda x: largest(x).sum()), X),
    "argmax": (lambda x: jnp.argmax(x, -1), X),
    "scatter": (lambda x, i, u: x.at[i].add(u), X, array(7, dtype=jnp.int32), array(7, COLUMNS)),
    "network": (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)), array(32, 48), array(16, 32)),
    "casts": (lambda x: (x.astype(jnp.bfloat16) + 1).astype(jnp.float32), X),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_classes_together_are_what_xlas_cost_analysis_says(name):
    executed, said = counted(*PROGRAMS[name])
    transcendental = executed.elementwise.pop("transcendental", 0)
    assert executed.total + executed.elementwise.total() == said["flops"]
    assert transcendental == said.get("transcendentals", 0)
    assert set(executed.elementwise) <= set(CLASSES)


def test_a_softmax_counts_as_by_hand():
    executed, _ = counted(jax.nn.softmax, X)
    # A maximum and a sum over each row; x - max, exp, division; the row's maximum once more beside -inf.
    assert executed.elementwise["reduction"] == 2 * ROWS * (COLUMNS - 1)
    assert executed.elementwise["transcendental"] == WHOLE
    assert executed.elementwise["arithmetic"] == 2 * WHOLE + ROWS
    assert executed.total == 0


def test_a_selection_is_a_comparison_and_its_result():
    executed, _ = counted(lambda x: jnp.where(x > 0, x, 2 * x), X)
    assert executed.elementwise == {"comparison": 2 * WHOLE, "arithmetic": WHOLE}


def test_integers_have_a_class_of_their_own():
    executed, _ = counted(lambda x: (x * 3) ^ 5, array(ROWS, dtype=jnp.int32))
    assert executed.elementwise == {"integer": 2 * ROWS}


def test_a_loop_counts_as_often_as_it_runs():
    def once(x, _):
        return jnp.tanh(x) * 2, None

    looped, said = counted(lambda x: lax.scan(once, x, None, length=10)[0], X)
    written_out, _ = counted(lambda x: lax.scan(once, x, None, length=10, unroll=10)[0], X)
    assert looped.elementwise["transcendental"] == 10 * WHOLE
    assert looped.elementwise["arithmetic"] == written_out.elementwise["arithmetic"] == 10 * WHOLE
    assert said["transcendentals"] <= looped.elementwise["transcendental"]


def test_elementwise_work_is_no_part_of_what_is_executed(samples):
    for name in samples.names:
        flops = samples.ledger(name).flops
        assert flops.executed == sum(flops.by_phase.values())
        assert sum(flops.elementwise_by_class.values()) > 0


@pytest.mark.parametrize("name", ["cruncher-8xH100", "cruncher-8xCPU"])
def test_crunchers_elementwise_work_is_its_loss_and_its_update(samples, name):
    rows, width = 4096, 1024
    parameters = 2 * width * width + width
    found = samples.ledger(name).flops.elementwise_by_class
    assert found["arithmetic"] >= 8 * 2 * parameters + 3 * rows  # p - 0.1 x g on every device; the error's
    assert found["arithmetic"] < 8 * 2 * parameters + 8 * rows  # square and its gradient
    assert "transcendental" not in found


def test_a_map_applies_its_computation_to_every_element(module):
    program = module(
        "%a = f32[8]{0} parameter(0)",
        "ROOT %m = f32[8]{0} map(%a), dimensions={0}, to_apply=%twice",
        before="""%twice (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] multiply(%x, %x)
  ROOT %z = f32[] add(%y, %x)
}
""",
    )
    assert executed_flops(executions_of(program)).elementwise == {"arithmetic": 16}
