"""The bias that balances experts without a loss, over the steps of a run."""

import math

import jax
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.errors import InputError
from meshwright.sharding import mesh_of
from meshwright.trainer.step import build_step
from tests.stepping import run_steps

RATE = 0.01
ROUTED = ("model.router=sigmoid", "model.router_bias=true", "model.balancing_loss=0", "data.source=synthetic")
SHORT = ("model.num_layers=1", "batch.sequences=8", "batch.sequence_length=32")


def biases_after(steps, *overrides, axes=(("data", 1),)):
    config = load_config("bytes-moe", (*ROUTED, *SHORT, *overrides))
    built = build_step(config, mesh_of(axes, jax.devices()[: math.prod(size for _, size in axes)]))
    _, state = run_steps(config, built, built.init(np.uint32(0)), steps)
    return np.asarray(state["parameters"]["layers"]["experts"]["router_bias"])


def test_a_step_moves_each_bias_by_the_rate():
    moved = biases_after(1, f"model.router_bias_rate={RATE}")
    assert set(np.unique(np.round(moved / RATE))) == {-1, 1}
    np.testing.assert_array_equal(biases_after(1), 0)


def test_layouts_and_microbatches_move_it_alike():
    rate = f"model.router_bias_rate={RATE}"
    wanted = biases_after(2, rate)
    split = biases_after(2, rate, "batch.microbatch_sequences=1", axes=(("data", 2), ("expert", 2)))
    np.testing.assert_allclose(split, wanted, atol=1e-7)


def test_a_rate_without_a_bias_is_refused():
    with pytest.raises(InputError, match="nothing to move without router_bias"):
        load_config("bytes-moe", ("model.router_bias_rate=0.001",))
