"""Frozen matrices in four bits (QLoRA): their numbers, their bytes, and runs beside them."""

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import meshwright as mw
from meshwright.config import Layout, check_layout, load_config, overridden
from meshwright.contrib.lora import (
    CODES,
    NF4,
    SCALES,
    dequantised,
    dequantised_array,
    quantised_part,
    to_codes,
)
from meshwright.errors import InputError
from meshwright.trainer.step import build_step

pytestmark = [pytest.mark.quick, pytest.mark.once]

WIDE, LONG = (functools.partial(pytest.param, marks=mark) for mark in (pytest.mark.wide, pytest.mark.long))
SIZES = ("model.embed_dim=128", "model.head_dim=32", "model.mlp_dim=384", "batch.sequences=4")
NF4_RUN = (*SIZES, "lora.rank=4", "lora.base=nf4", 'lora.targets=["all-linear"]', "data.source=synthetic")


def test_the_sixteen_values_are_quantiles_of_a_normal_distribution():
    """As the paper's authors make them: nine positive, one zero and eight negative ones less one of the two
    zeros, of equal probability, divided by the largest (bitsandbytes, `create_normal_map`)."""
    most = 0.9677083
    positive = norm.ppf(np.linspace(most, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(most, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([positive, [0.0], negative]))
    np.testing.assert_allclose(NF4, values / values.max(), atol=1e-6)


@pytest.mark.parametrize("size", [64, 48, 192])
def test_a_matrix_comes_back_within_half_a_gap_of_its_scale(size):
    matrix = np.random.default_rng(0).normal(0, 0.02, (3, 5, size)).astype(np.float32)
    codes, scales = to_codes(matrix)
    assert codes.dtype == np.uint8
    assert codes.nbytes == matrix.size // 2
    back = dequantised_array(codes, scales)
    block = size // scales.shape[-1]
    largest = abs(matrix.reshape(3, 5, -1, block)).max(-1)
    np.testing.assert_array_equal(scales, largest)
    widest = max(high - low for low, high in pairwise(NF4))
    assert (abs(back - matrix).reshape(3, 5, -1, block) <= largest[..., None] * widest / 2 * 1.0001).all()
    again = to_codes(back)
    np.testing.assert_array_equal(dequantised_array(*again), back)
    np.testing.assert_array_equal(
        np.asarray(dequantised(jnp.asarray(codes), jnp.asarray(scales), jnp.float32)), back
    )
    for mine, theirs in zip(to_codes(jnp.asarray(matrix), jnp), (codes, scales), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_block_of_zeros_stays_zero():
    np.testing.assert_array_equal(dequantised_array(*to_codes(np.zeros((2, 64), np.float32))), 0)


@pytest.mark.parametrize("size", [192, 96])
def test_parts_are_those_of_the_whole(size):
    matrix = np.random.default_rng(1).normal(0, 1, (4, size)).astype(np.float32)
    wholes = dict(zip((CODES, SCALES), to_codes(matrix), strict=True))
    asked = []

    def read(wanted):
        asked.append(wanted)
        return matrix[:, wanted]

    for suffix, whole in wholes.items():
        for start, stop in ((0, None), (0, whole.shape[1] // 3), (whole.shape[1] // 3, whole.shape[1])):
            found = quantised_part(read, size, suffix, slice(start, stop))
            np.testing.assert_array_equal(found, whole[:, start:stop])
    block = size // wholes[SCALES].shape[1]
    assert all(each.start % block == each.stop % block == 0 for each in asked), "whole blocks are read"


built_once = functools.cache(build_step)  # for equal configurations and meshes; compiled once then


def states_after(config, mesh, steps=2, state=None):
    built = built_once(config, mesh)
    state = built.init(np.uint32(0)) if state is None else state(built)
    losses = []
    for number in range(steps):
        tokens = np.random.default_rng(number).integers(0, 256, built.batch["tokens"].shape, np.int32)
        batch = {"tokens": jax.device_put(tokens, built.batch["tokens"].sharding)}
        state, metrics = built.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def whole(tree):
    """The frozen parameters with every matrix whole again."""
    if not isinstance(tree, dict):
        return tree
    made = {name: whole(below) for name, below in tree.items() if not name.endswith((CODES, SCALES))}
    for name in [name.removesuffix(CODES) for name in tree if name.endswith(CODES)]:
        codes, scales = (np.asarray(tree[name + part]) for part in (CODES, SCALES))
        made[name] = jnp.asarray(dequantised_array(codes, scales))
    return made


@pytest.mark.parametrize("remat", [LONG("none"), "dots-attention", WIDE("full")])
def test_a_run_is_that_beside_the_same_numbers_in_fp32(remat, mesh):
    config = load_config("bytes-nano", (*NF4_RUN, f"remat={remat}", "precision=fp32"))
    first = jax.tree.map(np.asarray, built_once(config, mesh()).init(np.uint32(0)))
    assert any(leaf.dtype == np.uint8 for leaf in jax.tree.leaves(first["frozen"])), "nothing is in four bits"
    ended, losses = states_after(config, mesh())

    def in_fp32(built):
        own = built.init(np.uint32(0))
        shardings = jax.tree.map(lambda x: x.sharding, own["frozen"])
        return {**own, "frozen": jax.device_put(whole(first["frozen"]), shardings)}

    wide, wanted = states_after(overridden(config, ["lora.base=fp32"]), mesh(), state=in_fp32)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for mine, theirs in zip(*(jax.tree.leaves(each["parameters"]) for each in (ended, wide)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    for before, after in zip(*(jax.tree.leaves(each["frozen"]) for each in (first, ended)), strict=True):
        np.testing.assert_array_equal(before, after)


AXES = {
    "data": {"data": 2},
    "fsdp, tensor": {"fsdp": 2, "tensor": 2},
    "context, fsdp": {"context": 2, "fsdp": 2},
    "more than the key-value heads": {"fsdp": 2, "tensor": 4},
}


@pytest.mark.parametrize(
    ("axes", "unroll"),
    [
        (AXES["fsdp, tensor"], "false"),
        LONG(AXES["data"], "true"),
        WIDE(AXES["context, fsdp"], "false"),
        WIDE(AXES["more than the key-value heads"], "false"),
        LONG(AXES["fsdp, tensor"], "true"),
        LONG(AXES["data"], "false"),
        LONG(AXES["context, fsdp"], "true"),
    ],
    ids=str,
)
def test_layouts_train_alike(axes, unroll, mesh):
    run = (*NF4_RUN, "precision=fp32", "remat=dots-attention", f"model.unroll={unroll}")
    if axes.get("tensor") == 4:  # which divides eight blocks of 64 numbers that share a scale
        run = (*run, "model.mlp_dim=512")
    _, alone = states_after(load_config("bytes-nano", run), mesh())
    _, split = states_after(load_config("bytes-nano", run), mesh(**axes))
    np.testing.assert_allclose(split, alone, rtol=2e-5)


@pytest.mark.parametrize(
    ("remat", "fleet"),
    [
        WIDE("none", "1xH100"),
        LONG("full", "2xH100"),
        LONG("none", "2xH100"),
        LONG("dots-attention", "1xH100"),
        LONG("dots-attention", "2xH100"),
        LONG("full", "1xH100"),
    ],
)
def test_products_take_four_and_a_half_bits_and_are_never_kept_whole(remat, fleet):
    sizes = ("model.embed_dim=1024", "model.mlp_dim=4096", "model.head_dim=64", "model.num_heads=16")
    small = ("model.num_layers=8", "batch.sequences=2", "batch.sequence_length=128", "precision=bf16")
    run = (*sizes, "model.num_kv_heads=16", *small, "lora.rank=4", "lora.base=nf4", f"remat={remat}")
    devices = int(fleet[0])
    weighed, plain = (
        mw.weigh("bytes-nano", on=fleet, layout=f"fsdp={devices}", overrides=each)
        for each in (run, [each for each in run if "nf4" not in each])
    )
    products = 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    tables = weighed.config.num_frozen_parameters - products
    held, held_plain = (
        sum(a.device_bytes for a in each.compiled.arguments if a.role == "frozen_parameters")
        for each in (weighed, plain)
    )
    assert held == pytest.approx((products * 4.5 / 8 + 2 * tables) / devices, rel=0.01)
    more = weighed.ledger.memory.reserved_bytes - held - plain.ledger.memory.reserved_bytes + held_plain
    assert more < 2 * products * 2 / 8, "two layers in bf16 at a time, of eight"
    assert weighed.ledger.flops.model == plain.ledger.flops.model


REFUSED = {
    "experts": (
        ("bytes-moe", "lora.rank=2", "lora.base=nf4"),
        'lora.base = "nf4", but matrices of experts are not held in four bits',
    ),
    "narrow heads": (
        ("bytes-nano", *NF4_RUN, "model.head_dim=24"),
        "a scale to every 16 to 64 numbers side by side, which do not divide head_dim = 24",
    ),
    "another format": (("bytes-nano", "lora.rank=2", "lora.base=int8"), "expected one of compute, fp32, nf4"),
}


@pytest.mark.parametrize(("asked", "words"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_held_in_four_bits_is_refused(asked, words):
    preset, *overrides = asked
    with pytest.raises(InputError) as refused:
        load_config(preset, overrides)
    assert words in str(refused.value)


def test_blocks_that_do_not_divide_over_an_axis_are_refused():
    config = load_config("bytes-nano", (*NF4_RUN, "model.mlp_dim=320", "model.num_kv_heads=4"))
    with pytest.raises(InputError) as refused:
        check_layout(config, Layout.parse("tensor=4"))
    words = "makes 5 blocks of model.mlp_dim = 320, which tensor = 4 does not divide"
    assert words in str(refused.value)
    assert "use tensor=1 or 5" in refused.value.hint
