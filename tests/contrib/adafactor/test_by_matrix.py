"""An update that sees each layer's matrices alone."""

import jax.numpy as jnp
import numpy as np
import optax

from meshwright.contrib.adafactor import by_matrix
from meshwright.trainer.models import Parameter


def test_by_matrix_a_stack_of_layers_is_treated_as_its_layers_one_by_one():
    shape = (3, 8, 2, 4)
    stack = {
        "matrix": Parameter(shape=shape, dims=("layers", "embed", "heads", "head_dim"), fan_in=8),
        "experts": Parameter(shape=(3, 2, 8, 4), dims=("layers", "experts", "embed", "mlp"), fan_in=8),
        "table": Parameter(shape=(5, 8), dims=("vocab", "embed"), fan_in=8),
    }
    random = np.random.default_rng(0)
    values = {n: jnp.asarray(random.standard_normal(p.shape), jnp.float32) for n, p in stack.items()}
    update = by_matrix(optax.clip_by_block_rms(0.01), stack)
    found, state = update.update(values, update.init(values), values)
    assert set(state) == {"stacked", "single", "experts"}
    matrices = [*values["matrix"], *values["experts"].reshape(-1, 8, 4)]
    for layer, got in zip(matrices, [*found["matrix"], *found["experts"].reshape(-1, 8, 4)], strict=True):
        np.testing.assert_allclose(got, layer * 0.01 / jnp.sqrt(jnp.mean(layer**2)), rtol=1e-6)
    np.testing.assert_allclose(
        found["table"], values["table"] * 0.01 / jnp.sqrt(jnp.mean(values["table"] ** 2)), rtol=1e-6
    )
