import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.contrib.toy_models import batch_norm, norm_parameters, norm_state
from meshwright.trainer.models import initial_parameters
from tests.rounding import FLOAT32

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
ROWS, CHANNELS, SIDE = 8, 3, 5


def given(seed=0):
    random = np.random.default_rng(seed)
    x = 3 + 2 * random.standard_normal((ROWS, CHANNELS, SIDE, SIDE), dtype="float32")
    parameters = {name: random.standard_normal(CHANNELS, dtype="float32") for name in ("scale", "bias")}
    return x, parameters, initial_parameters(norm_state(CHANNELS), jax.random.key(0))


def theirs(x, parameters):
    layer = torch.nn.BatchNorm2d(CHANNELS)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(parameters["scale"]))
        layer.bias.copy_(torch.tensor(parameters["bias"]))
    return layer, layer(torch.tensor(x)).detach().numpy()


def ours(x, parameters, state, run, statistics="global", weights=None):
    return jax.jit(lambda *a: batch_norm(*a, run, statistics, weights))(x, parameters, state)


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=FLOAT32)


def same_state(state, layer):
    close(state["mean"], layer.running_mean.numpy())
    close(state["variance"], layer.running_var.numpy())


def test_parameters_start_at_one_and_zero_and_running_statistics_at_zero_and_one():
    found = initial_parameters(norm_parameters(2), jax.random.key(0))
    kept = initial_parameters(norm_state(2), jax.random.key(0))
    assert (list(found["scale"]), list(found["bias"])) == ([1, 1], [0, 0])
    assert (list(kept["mean"]), list(kept["variance"])) == ([0, 0], [1, 1])


@pytest.mark.parametrize("layout", [{}, {"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_numbers_and_running_statistics_are_pytorchs_on_every_layout(layout, context):
    x, parameters, state = given()
    layer, wanted = theirs(x, parameters)
    y, state = ours(x, parameters, state, context(**layout))
    close(y, wanted)
    same_state(state, layer)


def test_evaluation_uses_the_running_statistics_and_leaves_them(context):
    x, parameters, state = given()
    layer, _ = theirs(x, parameters)
    run = context()
    _, state = ours(x, parameters, state, run)
    other = given(seed=1)[0]
    y, after = ours(other, parameters, state, dataclasses.replace(run, training=False))
    close(y, layer.eval()(torch.tensor(other)).detach().numpy())
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_per_replica_each_group_of_rows_has_its_own_statistics(context):
    x, parameters, state = given()
    y, after = ours(x, parameters, state, context(data=2, fsdp=2), "replica")
    groups = [theirs(x[i : i + 2], parameters) for i in range(0, ROWS, 2)]
    close(y, np.concatenate([wanted for _, wanted in groups]))
    close(after["mean"], np.mean([layer.running_mean.numpy() for layer, _ in groups], axis=0))
    close(after["variance"], np.mean([layer.running_var.numpy() for layer, _ in groups], axis=0))


@pytest.mark.parametrize("statistics", ["global", "replica"])
def test_rows_of_weight_zero_are_left_out_of_the_statistics(statistics, context):
    """Also where a replica has none but such."""
    x, parameters, state = given()
    layer, wanted = theirs(x[:4], parameters)
    weights = jnp.array([2.0] * 4 + [0.0] * 4)
    y, after = ours(x, parameters, state, context(data=2), statistics, weights)
    close(y[:4], wanted)
    same_state(after, layer)
    assert np.isfinite(np.asarray(y)).all()


def test_where_no_row_counts_nothing_moves(context):
    x, parameters, state = given()
    _, after = ours(x, parameters, state, context(), weights=jnp.zeros(ROWS))
    jax.tree.map(np.testing.assert_array_equal, after, state)
