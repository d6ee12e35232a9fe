"""Microbatches against the whole batch at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.models import Outcome
from meshwright.step._gradients import gradients_of


def loss(parameters, state, batch, key):
    """A mean square; the state counts the microbatches, and a metric shows the mean input."""
    error = batch["x"] * parameters["w"] - 1
    return jnp.mean(error**2), Outcome({"seen": state["seen"] + 1}, {"mean": jnp.mean(batch["x"])})


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_however_a_batch_is_cut_loss_gradient_and_metrics_are_those_of_the_whole(mesh, num_microbatches):
    x = np.linspace(-1, 2, 16, dtype=np.float32)
    parameters, whole = {"w": jnp.float32(0.5)}, {"w": NamedSharding(mesh(), PartitionSpec())}
    value, outcome, gradient = jax.jit(
        lambda batch: gradients_of(loss, whole, parameters, {"seen": 0}, batch, jax.random.key(0))
    )({"x": x.reshape(num_microbatches, -1)})
    by_hand = 0.5 * x - 1
    assert float(value) == pytest.approx(np.mean(by_hand**2), rel=1e-6)
    assert float(gradient["w"]) == pytest.approx(np.mean(2 * by_hand * x), rel=1e-6)
    assert float(outcome.metrics["mean"]) == pytest.approx(np.mean(x), rel=1e-6)
    assert int(outcome.state["seen"]) == num_microbatches
