import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.models import Model, Parameter, initial_parameters, model_of

WIDE = Parameter(shape=(400, 500), dims=("embed", "mlp"), fan_in=400)
# Of a normal cut at three of its own sigma: 1 - 2 x 3 phi(3) / (2 Phi(3) - 1), computed by hand from tables.
VARIANCE_WITHIN_THREE_SIGMA = 1 - 6 * 0.00443185 / 0.99730020


def drawn(declared, seed=0):
    return jax.jit(lambda: initial_parameters(declared, jax.random.key(seed)))()


def test_weights_are_normal_with_one_over_the_root_of_fan_in_and_nothing_beyond_three_sigma():
    values = np.asarray(drawn({"w": WIDE})["w"])
    sigma = 1 / 20
    assert values.dtype == np.float32
    assert values.std() == pytest.approx(sigma * VARIANCE_WITHIN_THREE_SIGMA**0.5, rel=0.01)
    assert values.mean() == pytest.approx(0, abs=5 * sigma / 400)
    assert 2.9 * sigma < np.abs(values).max() <= 3 * sigma


def test_zeros_and_ones():
    declared = {name: Parameter(shape=(3,), dims=("embed",), initial=name) for name in ("zeros", "ones")}
    values = drawn(declared)
    np.testing.assert_array_equal(values["zeros"], np.zeros(3))
    np.testing.assert_array_equal(values["ones"], np.ones(3))


def test_a_parameter_starts_the_same_whatever_stands_beside_it():
    alone = drawn({"w": WIDE})["w"]
    beside = drawn({"w": WIDE, "a": [WIDE, WIDE]})
    np.testing.assert_array_equal(alone, beside["w"])
    assert not np.array_equal(beside["a"][0], beside["a"][1])
    assert not np.array_equal(alone, drawn({"w": WIDE}, seed=1)["w"])


@pytest.mark.parametrize("preset", ["linear", "line", "cruncher", "lenet", "bytes-nano", "gpt2-124m"])
def test_every_parameter_of_a_model_is_declared_with_a_name_for_each_dimension(preset):
    config = load_config(preset)
    model = model_of(config.model)
    assert isinstance(model, Model)
    declared = jax.tree.leaves(model.parameters(), is_leaf=lambda x: isinstance(x, Parameter))
    assert all(len(p.shape) == len(p.dims) for p in declared)
    assert sum(int(np.prod(p.shape)) for p in declared) == config.model.num_parameters


@pytest.mark.parametrize("preset", ["linear", "cruncher", "bytes-nano"])
def test_a_matrix_is_scaled_by_how_many_numbers_it_sums(preset):
    """Fan-in is the product of the dimensions that a product contracts: by hand, all before the outputs."""
    model = model_of(load_config(preset).model)
    tables = ("embedding", "head", "positions")
    for path, p in jax.tree_util.tree_leaves_with_path(
        model.parameters(), is_leaf=lambda x: isinstance(x, Parameter)
    ):
        if p.initial != "fan_in":
            continue
        name = str(path[-1].key) if hasattr(path[-1], "key") else ""
        sizes = dict(zip(p.dims, p.shape, strict=True))
        if name in tables and "vocab" in sizes:
            contracted = sizes["embed"]
        elif name == "output":
            contracted = sizes["heads"] * sizes["head_dim"]
        elif name == "down":
            contracted = sizes["mlp"]
        else:
            contracted = sizes["embed"]
        assert p.fan_in == contracted, (path, p)


def test_the_context_casts_and_leaves_alone_on_one_device(context):
    run = context(dtype=jnp.bfloat16)
    x = jnp.ones((2, 2))
    assert run.pin(x, "batch", "embed") is x
    assert run.gather(x, "embed", "mlp").dtype == jnp.bfloat16
