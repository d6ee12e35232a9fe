"""Rotary positions, by the definition and on every platform alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.rotary import Turns, rotated


def x_of(width):
    return jnp.array(np.random.default_rng(0).standard_normal((2, 5, 3, width), dtype="float32"))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_is_a_complex_number_that_is_turned(platform, interleaved):
    turns, x = Turns(jnp.array([1.0, 0.3]), 1.5, interleaved), x_of(6)
    places = jnp.array([[0, 1, 2, 3, 4], [7, 0, 1, 0, 1]])
    found = jax.jit(lambda x: rotated(x, turns, places, platform))(x)
    pairs = (x[..., 0:4:2], x[..., 1:4:2]) if interleaved else (x[..., :2], x[..., 2:4])
    angles = np.asarray(places)[:, :, None, None] * np.array([1.0, 0.3])
    wanted = 1.5 * (np.asarray(pairs[0]) + 1j * np.asarray(pairs[1])) * np.exp(1j * angles)
    np.testing.assert_allclose(found[..., :2], wanted.real, atol=1e-6)
    np.testing.assert_allclose(found[..., 2:4], wanted.imag, atol=1e-6)
    np.testing.assert_array_equal(found[..., 4:], x[..., 4:])  # not turned


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cpus_exchange_the_halves_in_another_way_with_the_same_bits(dtype):
    turns, x = Turns(1.0 / jnp.arange(1, 5)), x_of(8).astype(dtype)

    def both(platform):
        out, back = jax.vjp(lambda x: rotated(x, turns, None, platform), x)
        return out, back(out)[0]

    for found, wanted in zip(both("cpu"), both("cuda"), strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, wanted)
