"""Parameters and moments in 16 bits: what is kept, how it is rounded, what a run learns with it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.config import StateConfig, load_config
from meshwright.errors import InputError
from meshwright.trainer.step import by_chance, rounded_as
from tests.stepping import IN_16_BITS, SHORT
from tests.stepping import trained_shortly as trained

pytestmark = pytest.mark.quick

PURE = (*IN_16_BITS, "state.parameters=bf16", "state.moments=bf16", "gradient_sum=bf16")
BY_CHANCE = (*PURE, "state.rounding=stochastic")


@pytest.mark.parametrize(
    "overrides", [pytest.param(PURE, marks=pytest.mark.wide), BY_CHANCE], ids=["nearest", "stochastic"]
)
def test_a_run_in_16_bits_learns_what_fp32_learns(overrides):
    (wide, _), (narrow, state) = trained(), trained(overrides)
    assert wide[-1] < wide[0] - 0.5
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    kept = state["parameters"]["layers"]["mlp"], state["parameters"]["embedding"]
    assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state["optimizer"]) if x.ndim} == {jnp.dtype(jnp.bfloat16)}


def test_a_master_copy_makes_the_updates_of_parameters_in_fp32():
    """A step computes with the numbers of a run in fp32, cast; its gradients are rounded sooner."""
    (wide, _), (narrow, state) = (
        trained(),
        trained((*IN_16_BITS, "state.parameters=bf16", "state.master=fp32")),
    )
    np.testing.assert_allclose(narrow, wide, rtol=1e-3)
    up, copy = (state[part]["layers"]["mlp"]["up"] for part in ("parameters", "master"))
    np.testing.assert_array_equal(up, copy.astype(jnp.bfloat16))
    assert state["master"]["layers"]["mlp_norm"]["scale"] is None  # itself in fp32


def test_weighed_a_master_copy_is_four_bytes_for_each_parameter_in_bf16():
    overrides = [*SHORT, *IN_16_BITS, "state.parameters=bf16", "state.master=fp32", "offload=optimizer"]
    weighed = mw.weigh("bytes-nano", on="1xH100", overrides=overrides)
    held = [a for a in weighed.compiled.arguments if a.role == "parameters"]
    narrow = sum(math.prod(a.shape) for a in held if a.dtype == "bfloat16")
    copies = [a for a in weighed.compiled.arguments if a.moment == "master"]
    assert sum(a.device_bytes for a in copies) == 4 * narrow > 100_000
    assert {(a.role, a.dtype, a.host) for a in copies} == {("optimizer_state", "float32", True)}


@pytest.mark.once
@pytest.mark.parametrize(
    "axes",
    [{"data": 2, "fsdp": 2, "tensor": 2}, pytest.param({"stage": 2, "data": 2}, marks=pytest.mark.wide)],
    ids=str,
)
def test_layouts_learn_alike_in_16_bits(axes):
    more = (*BY_CHANCE, "batch.microbatch_sequences=2", *(["zero1=true"] if "stage" in axes else []))
    alone, _ = trained(BY_CHANCE)
    together, _ = trained(more, tuple(axes.items()), steps=6)
    np.testing.assert_allclose(together, alone[:6], rtol=0.01)


def test_rounding_by_chance_is_right_on_average_and_keeps_what_is_no_number():
    x = jnp.full(40_000, 1 + 2**-10, jnp.float32)  # an eighth of the way from 1 to the next bfloat16
    found = np.asarray(by_chance(x, jax.random.key(0)), np.float32)
    assert set(found) == {1.0, 1 + 2**-7}
    assert abs((found > 1).mean() - 1 / 8) < 4 * math.sqrt(1 / 8 * 7 / 8 / 40_000)
    special = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.5])
    np.testing.assert_array_equal(by_chance(special, jax.random.key(1)).astype(jnp.float32), special)


def test_updates_too_small_for_nearest_rounding_are_made_by_chance():
    old, new = {"matrix": jnp.ones(1000, jnp.bfloat16)}, {"matrix": jnp.full(1000, 1 + 2**-10, jnp.float32)}

    def moved(rounding):
        found = rounded_as(old, new, StateConfig(parameters="bf16", rounding=rounding), jax.random.key(0))
        assert found["matrix"].dtype == jnp.bfloat16
        return int((found["matrix"] != old["matrix"]).sum())

    assert moved("nearest") == 0
    assert 80 < moved("stochastic") < 170  # an eighth of them, within four standard deviations


def test_weighed_a_state_in_16_bits_is_half_of_one_in_32():
    """By hand: 4 bytes less for each number of a matrix or table, 2 of it and 2 of one of two moments."""
    wide, narrow = (
        mw.weigh("bytes-nano", on="1xH100", overrides=[*SHORT, *more]) for more in (IN_16_BITS, PURE)
    )
    held = [
        sum(a.device_bytes for a in w.compiled.arguments if a.role in ("parameters", "optimizer_state"))
        for w in (wide, narrow)
    ]
    vectors = sum(
        math.prod(a.shape)
        for a in narrow.compiled.arguments
        if a.role == "parameters" and a.dtype == "float32"
    )
    numbers = wide.compiled.num_parameters
    assert held[0] - held[1] == 2 * (numbers - vectors) + 2 * 2 * numbers
    assert narrow.rule_of_thumb is not None
    assert "in bf16 where the rule counts fp32" in narrow.rule_of_thumb.rows[0].why


def test_the_rule_counts_muons_moments_in_16_bits_too():
    """They have no rule of thumb: the numbers are those of the program's arguments."""
    muon = [*SHORT, *PURE, "optimizer.kind=muon"]
    weighed = mw.weigh("bytes-nano", on="1xH100", overrides=muon)
    assert weighed.rule_of_thumb is not None
    assert weighed.rule_of_thumb.optimizer_state > weighed.compiled.num_parameters


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["state.moments=8bit", "state.rounding=stochastic"], "parameters are in fp32, moments in 8bit"),
        (["state.master=fp32"], "the parameters themselves are in fp32"),
        (["precision=fp32", "state.parameters=bf16"], "precision = 'fp32' computes with other numbers"),
        (["gradient_sum=all-fp32", "state.parameters=bf16"], "needs parameters in fp32"),
        (["state.rounding=stochastic"], "parameters are in fp32, moments in fp32"),
    ],
)
def test_formats_that_do_not_go_together_are_refused(overrides, words):
    with pytest.raises(InputError, match=words):
        load_config("bytes-nano", overrides)
