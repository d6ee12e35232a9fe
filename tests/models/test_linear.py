import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import LinearModel
from meshwright.models.linear import Linear


@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_least_squares(bias, context):
    random = np.random.default_rng(0)
    shapes = ((6, 4), (6,), (4, 1))
    inputs, targets, weight = (random.standard_normal(shape, dtype="float32") for shape in shapes)
    model = Linear(LinearModel(kind="linear", input_dim=4, bias=bias))
    parameters = {"weight": weight}
    if bias:
        parameters["bias"] = np.float32([0.5])
    run, batch = context(), {"inputs": jnp.array(inputs), "targets": jnp.array(targets)}
    value, gradients = jax.jit(jax.value_and_grad(lambda p: model.loss(p, {}, batch, run)[0]))(parameters)
    error = inputs @ weight[:, 0] + (0.5 if bias else 0.0) - targets
    np.testing.assert_allclose(value, np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(gradients["weight"][:, 0], 2 / 6 * inputs.T @ error, rtol=1e-5)
    if bias:
        np.testing.assert_allclose(gradients["bias"], [2 / 6 * error.sum()], rtol=1e-5)


def test_it_declares_a_bias_only_where_asked_for():
    assert set(Linear(LinearModel(kind="linear", input_dim=4)).parameters()) == {"weight"}
    assert set(Linear(LinearModel(kind="linear", input_dim=4, bias=True)).parameters()) == {"weight", "bias"}
