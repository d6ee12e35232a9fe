"""Rotary positions against the definition, a product of complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.trainer.models.rotary import Turns, rotated
from tests.rounding import FLOAT32


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_is_a_complex_number_that_is_turned(interleaved):
    turns = Turns(jnp.array([1.0, 0.3]), 1.5, interleaved)
    x = jnp.array(np.random.default_rng(0).standard_normal((2, 5, 3, 6), dtype="float32"))
    places = jnp.array([[0, 1, 2, 3, 4], [7, 0, 1, 0, 1]])
    found = jax.jit(lambda x: rotated(x, turns, places))(x)
    pairs = (x[..., 0:4:2], x[..., 1:4:2]) if interleaved else (x[..., :2], x[..., 2:4])
    angles = np.asarray(places)[:, :, None, None] * np.array([1.0, 0.3])
    wanted = 1.5 * (np.asarray(pairs[0]) + 1j * np.asarray(pairs[1])) * np.exp(1j * angles)
    np.testing.assert_allclose(found[..., :2], wanted.real, atol=FLOAT32)
    np.testing.assert_allclose(found[..., 2:4], wanted.imag, atol=FLOAT32)
    np.testing.assert_array_equal(found[..., 4:], x[..., 4:])  # not turned
