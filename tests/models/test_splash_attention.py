"""Splash attention, JAX's kernel for TPUs, computes causal attention; its program runs here interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.trainer.models.splash_attention import splash_attention, takes


@pytest.mark.parametrize("cap", [None, pytest.param(2.0, marks=pytest.mark.wide)])
def test_the_kernel_and_its_gradients_equal_textbook_attention(cap: float | None) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((1, 256, 4, 64), (1, 256, 2, 64), (1, 256, 2, 64), (1, 256, 4, 64))
    query, key, value, gradient = (
        jax.random.normal(each, shape) for each, shape in zip(keys, shapes, strict=True)
    )

    def textbook(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8  # the root of the head's 64
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), value)

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return splash_attention(query, key, value, cap, "attention_output", interpret=True)

    ours, ours_back = jax.vjp(kernel, query, key, value)
    theirs, theirs_back = jax.vjp(textbook, query, key, value)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for one, other in zip(ours_back(gradient), theirs_back(gradient), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)


def test_lengths_and_heads_that_no_block_divides_are_left_to_plain_blocks() -> None:
    assert takes(8192, 128, 128)
    assert takes(384, 64, 64)
    assert not takes(1000, 128, 128)  # no multiple of the 128 columns of a vector
    assert not takes(2048, 80, 80)
    assert not takes(2048, 192, 128)  # values of their own width
