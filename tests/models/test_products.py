"""Products of activations and matrices whose gradient is in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.sharding import gather, look_up
from meshwright.trainer.models.products import product

pytestmark = pytest.mark.quick

SHAPES = [((4, 6), (6, 5), 1, 0), ((2, 4, 2, 3), (2, 3, 5), 2, 0), ((3, 4, 6), (3, 6, 5), 1, 1)]


@pytest.mark.parametrize(("of_x", "of_matrix", "num_contracted", "num_batch"), SHAPES, ids=str)
def test_a_float32_matrix_multiplies_as_one_in_bf16_and_gets_its_gradient_before_rounding(
    of_x, of_matrix, num_contracted, num_batch
):
    random = np.random.default_rng(0)
    x, matrix = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in (of_x, of_matrix))

    def pulled(matrix):
        y, back = jax.vjp(lambda x, m: product(x, m, num_contracted, num_batch), x, matrix)
        d_y = jnp.asarray(np.random.default_rng(1).normal(size=y.shape), y.dtype)
        return y, *back(d_y), d_y

    y, d_x, rounded, _ = pulled(matrix)
    wide_y, wide_d_x, d_matrix, d_y = pulled(matrix.astype(jnp.float32))
    np.testing.assert_array_equal(y, wide_y)
    np.testing.assert_array_equal(d_x, wide_d_x)
    assert d_matrix.dtype == jnp.float32
    np.testing.assert_array_equal(d_matrix.astype(jnp.bfloat16), rounded)
    rows = np.asarray(x, np.float64).reshape(*of_x[:num_batch], -1, *of_matrix[num_batch:][:num_contracted])
    rows = rows.reshape(*of_x[:num_batch], rows.shape[num_batch], -1)
    outputs = np.asarray(d_y, np.float64).reshape(*of_x[:num_batch], rows.shape[num_batch], -1)
    by_hand = np.swapaxes(rows, -1, -2) @ outputs
    np.testing.assert_allclose(d_matrix, by_hand.reshape(of_matrix), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("is_wide", "total"), [(True, 256 + 7 * 0.5), (False, 260.0)])
def test_a_gradient_over_fsdp_keeps_what_bf16_would_round_only_if_it_is_wide(mesh, is_wide, total):
    """Eight devices have gradients of 256 and seven times 0.5; bf16 numbers there are 2 apart."""
    on, x = mesh(fsdp=8), np.full((8, 1), 0.5, np.float32)
    x[0] = 256.0
    weight = jnp.zeros((8, 8))

    def loss(weight):
        matrix = gather(weight, on, jnp.bfloat16, "embed", "mlp", wide_gradient=is_wide)
        rows = jnp.broadcast_to(jnp.asarray(x, jnp.bfloat16), (8, 8))
        return jnp.sum(product(rows, matrix, 1).astype(jnp.float32))

    assert np.all(np.asarray(jax.jit(jax.grad(loss))(weight)) == total)


def test_a_float32_table_is_looked_up_in_the_format_asked_for_and_summed_in_float32(mesh):
    on, ids = mesh(data=4), jnp.zeros((4, 1), jnp.int32)
    table = jnp.full((4, 8), 1 + 2**-12)
    share = jnp.asarray([256.0, 0.5, 0.5, 0.5], jnp.bfloat16)[:, None, None]

    def looked_up(table):
        return look_up(table, ids, on, dtype=jnp.bfloat16)

    found, back = jax.vjp(looked_up, table)
    assert found.dtype == jnp.bfloat16
    assert np.all(np.asarray(found, np.float32) == 1.0)
    gradient = back(jnp.broadcast_to(share, found.shape))[0]
    assert gradient.dtype == jnp.float32
    assert np.all(np.asarray(gradient)[0] == 257.5)
