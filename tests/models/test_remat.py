from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.transformer import BLOCK_INPUT, rematerialised


def block(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
    x = checkpoint_name(x, BLOCK_INPUT)
    return jnp.sin(x @ weight), None


def gradient_of(context, **chosen):
    """The traced gradient of two blocks on one device."""
    kept = rematerialised(block, replace(context(), **chosen), scanned=True)
    weights = jnp.ones((2, 4, 4))
    traced = jax.make_jaxpr(jax.grad(lambda x: jax.lax.scan(kept, x, weights)[0].sum()))(jnp.ones((3, 4)))
    return str(traced)


def test_on_one_device_a_block_that_keeps_all_stays_as_it_is(context):
    assert rematerialised(block, replace(context(), remat="none"), scanned=True) is block


@pytest.mark.parametrize(("remat", "products"), [("none", 2), ("dots", 2), ("full", 3)])
def test_a_product_is_computed_again_only_where_nothing_but_the_input_is_kept(context, remat, products):
    """Forward, again, and the input's gradient."""
    assert gradient_of(context, remat=remat).count("dot_general") == products


def test_a_blocks_input_waits_in_host_memory_and_comes_back(context):
    assert "pinned_host" not in gradient_of(context, remat="full")
    offloaded = gradient_of(context, remat="full", offloads=True)
    assert offloaded.count("dot_general") == 3
    assert offloaded.count("device_put") == 2
