import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import FaultConfig
from meshwright.training._recorder import BadSteps, Spikes, first_bad_tensor, what_is_bad

GOOD = {"loss": 1.0, "gradient_norm": 1.0, "applied": 1.0}


def test_a_step_is_bad_when_it_was_not_applied_and_no_loss_scale_is_being_found():
    assert what_is_bad(GOOD) == ""
    bad = {**GOOD, "applied": 0.0}
    assert what_is_bad({**bad, "loss": float("nan")}) == "loss is nan"
    assert what_is_bad({**bad, "gradient_norm": float("inf")}) == "gradient norm is inf"
    assert what_is_bad({**bad, "gradient_norm": float("inf"), "loss_scale": 2.0}) == ""
    assert what_is_bad({**bad, "gradient_norm": float("inf"), "loss_scale": 1.0}) != ""


@pytest.mark.parametrize("kind", ["skip", "rollback"])
def test_too_many_bad_steps_in_a_row_stop_the_run(kind):
    steps = BadSteps(FaultConfig(bad_step=kind, most_bad_steps=3))
    assert [steps.bad(5), steps.bad(6)] == [kind, kind]
    steps.good(4)  # gone over once more, before the bad ones
    assert steps.bad(6) == "stop"
    steps.good(7)
    assert steps.bad(8) == kind


def test_a_loss_far_above_those_before_it_is_a_spike():
    spikes, random = Spikes(6.0), np.random.default_rng(0)
    usual = [spikes.judge(2.0 + 0.01 * random.standard_normal()) for _ in range(100)]
    assert set(usual) == {""}
    assert "loss 2.2 is " in spikes.judge(2.2)
    assert spikes.judge(1.0) == ""  # lower is no harm


def test_few_or_equal_losses_tell_no_deviation():
    spikes = Spikes(6.0)
    assert [spikes.judge(loss) for loss in [1.0] * 10 + [9.0]] == [""] * 11
    spikes = Spikes(6.0)
    assert [spikes.judge(loss) for loss in [1.0] * 40 + [9.0]] == [""] * 41


def counting(**bad):
    def inspect(state, batch):
        counts = {"batch": {"x": 0}, "parameters": {"w": 0, "v": 0}, "loss": 0, "gradients": {"w": 0, "v": 0}}
        assert int(state["step"]) == 7
        return jax.tree.map(jnp.asarray, counts | bad)

    return inspect


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"loss": 1}, "first not finite: loss"),
        ({"loss": 1, "batch": {"x": 3}}, "first not finite: batch/x, 3 of its numbers"),
        (
            {"gradients": {"v": 1, "w": 2}},
            "first not finite: gradients/v; and 1 other arrays of the gradients",
        ),
        ({}, "done once more, all is finite: look at the machine's memory"),
    ],
)
def test_the_first_bad_tensor_is_the_one_nearest_to_the_cause(bad, words):
    assert first_bad_tensor(counting(**bad), {"step": jnp.int32(9)}, {}, 2) == words


def test_a_look_that_needs_too_much_memory_does_not_end_the_run():
    def inspect(state, batch):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

    words = first_bad_tensor(inspect, {"step": jnp.int32(9)}, {}, 2)
    assert words == "which tensor came first could not be looked at: RESOURCE_EXHAUSTED: out of memory"
