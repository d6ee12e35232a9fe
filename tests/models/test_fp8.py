"""Products in eight bits, against float32 and against the numbers' own rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshwright as mw
from meshwright.compiler import read_text
from meshwright.sharding import gather, mesh_of
from meshwright.trainer.models.eight_bits import (
    NarrowMatrix,
    Placement,
    fp8_product,
    quantised,
    quantised_matrix,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def operands():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 16, 4, 8)).astype(np.float32)
    weight = generator.normal(size=(4, 8, 24)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(weight)


def distance(mine, theirs):
    return np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("magnitude", [1e-36, 1e-20, 1.0, 3.5, 448.0, 1e20, 3e38])
def test_the_scale_is_the_least_power_of_two_that_brings_all_numbers_into_the_format(dtype, magnitude):
    x = np.array([0.5, -1.0, 0.25], np.float32) * np.float32(magnitude)
    values, scale = quantised(jnp.asarray(x), dtype)
    most = float(ml_dtypes.finfo(dtype).max)
    assert float(scale) == max(2.0 ** np.ceil(np.log2(magnitude / most)), 2.0**-126)  # the smallest normal
    assert np.isfinite(np.asarray(values, np.float32)).all()
    assert np.allclose(values.astype(jnp.float32) * scale, x, rtol=2**-3)


def test_a_tensor_of_zeros_stays_zeros():
    values, scale = quantised(jnp.zeros(4), jnp.float8_e4m3fn)
    assert float(scale) == 1
    assert not np.asarray(values, np.float32).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_reaches_the_product(operands, bad):
    x, weight = operands
    x = x.at[0, 0, 0, 0].set(bad)
    assert not np.isfinite(fp8_product(x, weight, 2, True)).all()


def test_the_product_and_its_gradients_are_those_of_float32_up_to_eight_bits(operands):
    x, weight = operands
    target = np.random.default_rng(1).normal(size=(2, 16, 24)).astype(np.float32)
    plain = np.einsum("bsij,ije->bse", x, weight)
    narrow, back = jax.vjp(lambda x, w: fp8_product(x, w, 2, True), x, weight)
    d_x, d_weight = back(jnp.asarray(target))
    # E4M3 rounds by 2^-4 at most, E5M2 by 2^-3; errors of a sum's terms partly cancel
    assert 0.005 < distance(narrow, plain) < 2**-4
    assert 0.005 < distance(d_x, np.einsum("bse,ije->bsij", target, weight)) < 2**-3
    assert 0.005 < distance(d_weight, np.einsum("bsij,bse->ije", x, target)) < 2**-3


def test_on_a_mesh_each_device_has_its_own_scale_and_gradients_are_summed(operands):
    """One scale for both devices would take the second one's small rows for zero."""
    x, weight = operands
    x = x.at[1].multiply(1e-8)
    d_out = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 24)), jnp.float32).at[1].multiply(1e8)
    mesh = mesh_of((("fsdp", 2),), jax.devices()[:2])
    rows = PartitionSpec("fsdp")
    at, dims = Placement(mesh, rows, rows), ("heads", "head_dim", "embed")

    def on_mesh(x, weight):
        matrix = gather(weight, mesh, jnp.float32, *dims, narrowed=quantised_matrix)
        return fp8_product(x, NarrowMatrix(*matrix), 2, True, at=at)

    def alone(x, weight):
        return fp8_product(x, weight, 2, True)

    with jax.set_mesh(mesh):
        y, back = jax.vjp(jax.jit(on_mesh), x, weight)
        d_x, d_weight = back(d_out)
    halves = [jax.vjp(alone, x[i : i + 1], weight) for i in range(2)]
    gradients = [back(d_out[i : i + 1]) for i, (_, back) in enumerate(halves)]
    np.testing.assert_allclose(y, jnp.concatenate([half for half, _ in halves]), rtol=1e-5)
    np.testing.assert_allclose(d_x, jnp.concatenate([first for first, _ in gradients]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(d_weight, gradients[0][1] + gradients[1][1], rtol=1e-4, atol=1e-4)
    assert distance(y[1], np.einsum("sij,ije->se", x[1], weight)) < 2**-4
    assert not jnp.any(alone(x, weight)[1])  # with one scale nothing is left of it


@pytest.mark.wide
def test_matrices_are_gathered_in_eight_bits_and_no_device_waits_for_a_scale_of_activations():
    sizes = ("model.embed_dim=256", "model.num_kv_heads=4", "model.mlp_dim=512", "remat=none")
    batch = ("batch.sequences=16", "batch.sequence_length=128", "data.source=synthetic", "precision=fp8")
    found = mw.weigh("bytes-nano", on="8xH100", layout="fsdp=8", overrides=(*sizes, *batch))
    in_layers = [row for row in found.ledger.traffic if row.in_loop]
    gathered = sum(row.payload_bytes for row in in_layers if row.kind == "all-gather")
    # Two layers on the way there and one back, for the last one's is outside the loop. Query, key, value and
    # output are 256 x 256, the MLP's three 256 x 512, a byte each.
    matrices = 3 * (4 * 256 * 256 + 3 * 256 * 512)
    assert matrices <= gathered < 1.01 * matrices  # and norms
    # The greatest magnitudes of these seven, in bf16; those of activations are each device's own.
    assert sum(row.payload_bytes for row in in_layers if row.kind == "all-reduce") == 3 * 7 * 2


def test_experts_multiply_their_rows_with_their_matrices_and_share_a_scale():
    generator = np.random.default_rng(2)
    x, weight, d_out = (
        jnp.asarray(generator.normal(size=size), jnp.float32)
        for size in ((3, 16, 8), (3, 8, 24), (3, 16, 24))
    )
    narrow, back = jax.vjp(lambda x, w: fp8_product(x, w, 1, True, 1), x, weight)
    d_x, d_weight = back(d_out)
    assert 0.005 < distance(narrow, np.einsum("esi,eio->eso", x, weight)) < 2**-4
    assert 0.005 < distance(d_x, np.einsum("eso,eio->esi", d_out, weight)) < 2**-3
    assert 0.005 < distance(d_weight, np.einsum("esi,eso->eio", x, d_out)) < 2**-3
    # With the others' largest numbers as large, an expert's product is that of its rows alone.
    x, weight = x.at[:, 0, 0].set(5.0), weight.at[:, 0, 0].set(5.0)
    all_experts = fp8_product(x, weight, 1, True, 1)
    for expert in range(3):
        alone = fp8_product(x[expert], weight[expert], 1, True)
        np.testing.assert_array_equal(all_experts[expert], alone)


def test_the_cpu_computes_the_numbers_that_its_own_products_of_eight_bits_give(operands):
    x, weight = operands
    here, there = (np.asarray(fp8_product(x, weight, 2, on_cpu)) for on_cpu in (True, False))
    assert np.allclose(here, there, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("fleet", "layout"),
    [("1xH100", "data=-1"), pytest.param("8xH100", "fsdp=4,tensor=2", marks=pytest.mark.wide)],
)
def test_where_there_are_fp8_units_the_compiled_products_of_the_layers_take_eight_bits(fleet, layout):
    sizes = ("model.embed_dim=256", "model.num_kv_heads=4", "model.mlp_dim=512")
    sizes += ("batch.sequences=16", "batch.sequence_length=128", "data.source=synthetic", "remat=none")
    found = mw.weigh("bytes-nano", on=fleet, layout=layout, overrides=("precision=fp8", *sizes))
    # Two layers; query and output are 256 x 256, key and value too, the MLP's three 256 x 512; 2048 tokens
    forward = 2 * 2 * (4 * 256 * 256 + 3 * 256 * 512) * 16 * 128
    by_format = found.ledger.flops.by_format
    assert (by_format["fp8-e4m3"], by_format["fp8-e5m2"]) == (forward, 2 * forward)
    assert "__cublas$lt$matmul$f8" in read_text(found.folder, "program.hlo.txt")
    assert not found.ledger.unpriced
    memory = found.ledger.memory
    narrow = sum(size for name, size in memory.by_format.items() if name.startswith("fp8-"))
    # One layer's input, at least. (On eight devices the peak lies in the embedding, where none is alive.)
    assert fleet != "1xH100" or narrow >= 16 * 128 * 256
    assert sum(memory.by_format.values()) == memory.reserved_bytes
    assert set(memory.by_category_and_format["parameters"]) == {"fp32"}


@pytest.mark.wide
def test_a_step_in_eight_bits_takes_no_more_memory_than_one_in_sixteen():
    """Eight layers: operands in eight bits of all their gradients of weights must not wait for the end."""
    sizes = {"embed_dim": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "mlp_dim": 2048}
    overrides = {f"model.{name}": size for name, size in sizes.items()} | {"model.vocab_size": 512}
    overrides |= {"batch.sequences": 16, "batch.microbatch_sequences": 8, "batch.sequence_length": 1024}
    reserved = {
        precision: mw.weigh(
            "llama-1b", on="1xH100", overrides={**overrides, "precision": precision}
        ).ledger.memory.reserved_bytes
        for precision in ("bf16", "fp8")
    }
    assert reserved["fp8"] <= reserved["bf16"]
