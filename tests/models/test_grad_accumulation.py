"""Gradients of stacked layers that are added to their sum where they are made, against plain gradients."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.compiler import read_text
from meshwright.config import holds_layers, load_config
from meshwright.trainer.models import initial_parameters
from meshwright.trainer.models.layer_gradients import slice_layer
from meshwright.trainer.models.transformer import Transformer

pytestmark = pytest.mark.quick

SMALL = (
    "model.embed_dim=16",
    "model.mlp_dim=24",
    "model.vocab_size=32",
    "precision=fp32",
    "data.source=synthetic",
)
TWO_WINDOWS = ("model.window=4", "model.global_every=2")
DENSE = ("model.num_dense_layers=1", "model.dense_mlp_dim=24")
MODELS = {
    "a loop": ("bytes-nano", "model.num_layers=3"),
    "no loop": ("bytes-nano", "model.num_layers=3", "layer_loop=unroll"),
    "groups, the last not whole": ("bytes-nano", "model.num_layers=5", *TWO_WINDOWS),
    "groups by policy": ("bytes-nano", "model.num_layers=4", "remat=full-every-2"),
    "several kinds": (
        *("bytes-moe", "model.num_layers=7", "model.dense_mlp_dim=24", "model.window=4"),
        "model.layer_pattern=local+experts mlp local+experts mlp local+experts mlp attention",
    ),
    "dense layers first": ("bytes-moe", "model.num_layers=3", *DENSE),
}


@pytest.mark.parametrize(
    "axes", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.wide)], ids=["alone", "split"]
)
@pytest.mark.parametrize(
    "name",
    [
        *("no loop", "groups, the last not whole", "groups by policy", "several kinds"),
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("a loop", "dense layers first")),
    ],
)
def test_the_gradient_of_the_sums_is_the_sums_and_the_layers_gradients(name, axes, context):
    preset, *changes = MODELS[name]
    config = load_config(preset, (*SMALL, *changes))
    model, run = Transformer(config.model), context(remat=config.remat, layer_loop=config.layer_loop, **axes)
    parameters = jax.jit(lambda: initial_parameters(model.parameters(), jax.random.key(0)))()
    tokens = jnp.asarray(np.random.default_rng(0).integers(32, size=(4, 17)), jnp.int32)
    groups = [group for group in parameters if holds_layers(group)]
    assert set(model.summed(run)) == (set() if axes or config.layer_loop == "unroll" else set(groups))
    sums = {group: jax.tree.map(jnp.ones_like, parameters[group]) for group in groups}

    def loss(parameters, sums):
        return model.loss(parameters, {}, {"tokens": tokens}, replace(run, sums=sums))[0]

    value, plain = jax.jit(jax.value_and_grad(loss))(parameters, None)
    same, (others, added) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(parameters, sums)
    assert float(same) == float(value)
    for group in groups:
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(others.pop(group)))
        wanted = jax.tree.map(lambda gradient: gradient + 1, plain.pop(group))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), added[group], wanted
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), others, plain)


def test_microbatches_make_no_second_copy_of_the_layers_gradients():
    """bf16: a stack of one microbatch's gradients would take half as many bytes as their sum in float32."""
    wide = (
        "model.num_layers=4",
        "model.embed_dim=256",
        "model.mlp_dim=1024",
        "precision=bf16",
        "layer_loop=keep",
    )
    rows = ("batch.sequences=2", "batch.microbatch_sequences=1")
    found = mw.weigh("bytes-nano", on="1xH100", overrides=(*wide, *rows))
    layers = 4 * (2 * 256 * 256 // 4 + 2 * 256 * 256 // 8 + 3 * 256 * 1024)  # products; heads of 16
    gradients = found.ledger.memory.by_category["gradients"]
    assert gradients < 4 * found.config.model.num_parameters + 2 * layers / 4  # at most one layer's beside


@pytest.mark.wide
def test_an_unrolled_loop_copies_no_layer_out_of_its_stack():
    found = mw.weigh("bytes-nano", on="1xH100", overrides=["remat=dots-attention"])
    text = read_text(found.folder, "program.hlo.txt")
    assert not re.findall(r"%wrapped_slice\S* = f32\[1,\S* fusion", text)


def test_a_layer_read_from_its_stack_has_the_stacks_values_and_the_layers_gradient():
    stack = {"a": jnp.arange(12.0).reshape(3, 4)}

    def loss(layer, whole):
        return jnp.sum(slice_layer(layer, whole, jnp.int32(2))["a"] ** 2)

    other = {"a": jnp.zeros(4)}
    assert loss(other, stack) == jnp.sum(stack["a"][2] ** 2)
    of_layer, of_stack = jax.grad(loss, argnums=(0, 1))(other, stack)
    np.testing.assert_array_equal(of_layer["a"], 2 * stack["a"][2])
    assert not of_stack["a"].any()
