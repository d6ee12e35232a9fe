"""Which dims of a parameter are a matrix's, by models whose products are known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.config import load_config, preset_names
from meshwright.models import Parameter, model_of
from meshwright.step._state import by_matrix, is_hidden_matrix, is_matrix, matrix_dims, muon_dims


def declared(preset, *overrides):
    return model_of(load_config(preset, overrides).model).parameters()


def flattened(parameter):
    return matrix_dims(parameter).flat_shape(parameter.shape)


def test_attentions_matrices_are_those_of_single_layers_with_all_heads_on_one_side():
    layers = declared("gpt2-124m")["layers"]
    for name in ("query", "key", "value"):
        assert flattened(layers["attention"][name]) == (12, 768, 12 * 64)
        assert muon_dims(layers["attention"][name]) == ((1,), (2, 3))
    assert flattened(layers["attention"]["output"]) == (12, 12 * 64, 768)
    assert muon_dims(layers["attention"]["output"]) == ((1, 2), (3,))
    assert muon_dims(layers["mlp"]["down"]) == ((1,), (2,))
    assert flattened(layers["attention"]["query_bias"]) == (12, 768)
    assert flattened(layers["mlp_norm"]["scale"]) == (12, 768)


def test_each_expert_is_a_matrix_of_its_own():
    layers = declared("bytes-moe", "model.num_shared_experts=2")["layers"]
    assert flattened(layers["experts"]["up"]) == (2, 4, 64, 128)
    assert flattened(layers["experts"]["down"]) == (2, 4, 128, 64)
    assert muon_dims(layers["experts"]["down"]) == ((2,), (3,))
    assert flattened(layers["experts"]["router"]) == (2, 64, 4)
    assert flattened(layers["mlp"]["up"]) == (2, 64, 2 * 128)


def test_a_convolutions_inputs_are_its_channels_and_the_window():
    kernel = declared("lenet")["convolution2"]["weight"]
    assert flattened(kernel) == (50, 20 * 5 * 5)
    assert muon_dims(kernel) == ((1, 2, 3), (0,))
    assert matrix_dims(kernel).inputs_outputs(kernel.shape) == (500, 50)


@pytest.mark.parametrize("preset", preset_names())
def test_every_parameter_of_every_preset_is_a_matrix_or_a_vector(preset):
    for parameter in jax.tree.leaves(declared(preset), is_leaf=lambda p: isinstance(p, Parameter)):
        dims = matrix_dims(parameter)
        assert sorted(dims.stack + dims.first + dims.second) == list(range(len(parameter.shape)))
        if is_matrix(parameter):
            assert dims.inputs_outputs(parameter.shape)[0] == parameter.fan_in


def test_tables_heads_norms_and_biases_are_no_hidden_matrices():
    leaves = jax.tree_util.tree_leaves_with_path(
        declared("gpt2-124m", "model.tied_embeddings=false"), is_leaf=lambda p: isinstance(p, Parameter)
    )
    hidden = {jax.tree_util.keystr(path) for path, p in leaves if is_hidden_matrix(p)}
    names = [("attention", n) for n in ("query", "key", "value", "output")]
    assert hidden == {f"['layers']['{g}']['{n}']" for g, n in [*names, ("mlp", "up"), ("mlp", "down")]}
    assert not is_hidden_matrix(declared("cruncher")["head"])
    assert all(is_hidden_matrix(p) for p in declared("cruncher")["layers"])


def test_a_parameter_whose_inputs_cannot_be_told_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="have its fan_in"):
        matrix_dims(Parameter(shape=(4, 6), dims=("embed", "mlp"), fan_in=5))
    with pytest.raises(AssertionError, match="stack is not first"):
        matrix_dims(Parameter(shape=(4, 6), dims=("embed", "layers"), fan_in=4))


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
