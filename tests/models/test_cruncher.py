import jax
import jax.numpy as jnp
import numpy as np

from meshwright.config import CruncherModel
from meshwright.models.linear import Cruncher


def test_loss_and_gradients_are_those_of_a_chain_of_matrices(context):
    random = np.random.default_rng(0)
    shapes = ((5, 3), (5,), (3, 3), (3, 3), (3, 1))
    inputs, targets, first, second, head = (random.standard_normal(s, dtype="float32") for s in shapes)
    model = Cruncher(CruncherModel(kind="cruncher", width=3, num_layers=2))
    run, batch = context(), {"inputs": jnp.array(inputs), "targets": jnp.array(targets)}
    parameters = {"layers": [first, second], "head": head}
    value, gradients = jax.jit(jax.value_and_grad(lambda p: model.loss(p, {}, batch, run)[0]))(parameters)
    error = inputs @ first @ second @ head - targets[:, None]
    slope = 2 / 5 * error
    np.testing.assert_allclose(value, np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(gradients["head"], (inputs @ first @ second).T @ slope, rtol=1e-4)
    np.testing.assert_allclose(gradients["layers"][1], (inputs @ first).T @ (slope @ head.T), rtol=1e-4)
    np.testing.assert_allclose(gradients["layers"][0], inputs.T @ (slope @ head.T @ second.T), rtol=1e-4)
