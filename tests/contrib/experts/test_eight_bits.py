"""Experts' products in eight bits, against those of whole matrices, and as a GPU gets them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshwright as mw
from meshwright.contrib.experts import whole_in_eight_bits
from meshwright.sharding import mesh_of, on_each_device
from meshwright.trainer.models.eight_bits import fp8_product

pytestmark = pytest.mark.quick


def test_experts_matrices_that_fsdp_gathers_in_eight_bits_have_one_scale_and_summed_gradients():
    generator = np.random.default_rng(3)
    sizes = ((4, 3, 16, 8), (3, 8, 24), (4, 3, 16, 24))
    x, weight, d_out = (jnp.asarray(generator.normal(size=size), jnp.float32) for size in sizes)
    weight = weight.at[:, :4].multiply(100.0)  # the first device's part is larger
    mesh = mesh_of((("fsdp", 2),), jax.devices()[:2])
    rows, split = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")

    def local(x, weight):
        matrix = whole_in_eight_bits(weight, 1, weight.dtype)
        return jnp.stack([fp8_product(each, matrix, 1, True, 1) for each in x])

    def alone(x, weight):
        return jnp.stack([fp8_product(each, weight, 1, True, 1) for each in x])

    on_mesh = jax.jit(on_each_device(local, mesh, (rows, split), rows))
    (y, back), (plain, plainly_back) = jax.vjp(on_mesh, x, weight), jax.vjp(alone, x, weight)
    np.testing.assert_allclose(y, plain, rtol=1e-4, atol=1e-3)
    for mine, theirs in zip(back(d_out), plainly_back(d_out), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize("capacity", ["none", "1.0"])
def test_experts_products_take_eight_bits_on_a_gpu_that_has_them(capacity):
    """Buffers have a slot for each choice; without them four experts have half a tile of padding each."""
    sizes = ("model.num_layers=1", "model.embed_dim=128", "model.num_heads=2", "model.num_kv_heads=2")
    sizes += ("model.head_dim=64", "model.mlp_dim=256", f"model.capacity_factor={capacity}", "remat=none")
    batch = ("batch.sequences=4", "batch.sequence_length=128", "data.source=synthetic", "precision=fp8")
    found = mw.weigh("bytes-moe", on="1xH100", overrides=(*sizes, *batch))
    tokens, choices = 4 * 128, 2 * 4 * 128
    attention = 2 * tokens * 4 * 128 * 128
    rows = choices + 4 * 64 if capacity == "none" else choices
    experts = 2 * rows * 3 * 128 * 256
    # Without a capacity the gradient of rows is in E4M3, and the gradients of matrices in 16 bits.
    of_gradients = (experts, 0) if capacity == "none" else (0, 2 * experts)
    by_format = found.ledger.flops.by_format
    expected = (attention + experts + of_gradients[0], 2 * attention + of_gradients[1])
    assert (by_format["fp8-e4m3"], by_format["fp8-e5m2"]) == expected


@pytest.mark.wide
def test_the_kernels_of_experts_fit_the_shared_memory_of_a_gpu_in_fp32():
    """Blocks of 128 x 256 with steps of 64 numbers are for 16 bits: of 32 they would take 360 KB."""
    sizes = ("model.num_layers=1", "model.embed_dim=256", "model.mlp_dim=512", "model.capacity_factor=none")
    batch = ("batch.sequences=1", "batch.sequence_length=512", "data.source=synthetic", "precision=fp32")
    found = mw.weigh("bytes-moe", on="1xH100", overrides=(*sizes, *batch))
    rows = 2 * 512 + 4 * 64  # four experts have half a tile of padding each
    summed = 2 * 512 + 4 * 16  # and in gradients of matrices half a step of 32 rows
    by_module = found.ledger.flops.by_module
    experts = sum(by_module[f"layers/mlp_block/experts/{name}"] for name in ("gate", "up", "down"))
    assert experts == 3 * 2 * (2 * rows + summed) * 256 * 512
