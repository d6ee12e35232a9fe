"""Declared parameters, their initial values, and the model of each kind of config."""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import Field

from meshwright.config import Layout, ModelKind, ModelSizes, RunConfig, check_layout, load_config
from meshwright.contrib.toy_models import Cruncher, LeNet, Linear, ResNet
from meshwright.errors import InputError
from meshwright.trainer.models import MODELS, Model, Outcome, Parameter, initial_parameters, model_of
from meshwright.trainer.models.transformer import Transformer
from meshwright.trainer.step import build_step
from tests.stepping import run_steps

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


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("linear", Linear),
        ("cruncher", Cruncher),
        ("lenet", LeNet),
        ("resnet18-fashion", ResNet),
        ("llama3-8b", Transformer),
    ],
)
def test_each_kind_of_config_has_its_model(preset, kind):
    config = load_config(preset).model
    model = model_of(config)
    assert type(model) is kind
    assert model.config is config


# A new kind: its record, its class, a line in `MODELS`, and its record in the union of `RunConfig.model`.
class ScalesModel(ModelKind):
    """One factor for each input; their sum is the output."""

    takes = "rows"
    kind: Literal["scales"]
    """Kind of model.
    Effect: none."""
    width: int
    """Numbers in one row.
    Effect: as many parameters.
    Unit: numbers"""

    @property
    def num_parameters(self):
        return self.width

    num_matmul_parameters = num_parameters

    @property
    def sizes(self):
        return ModelSizes(
            input_shape=(self.width,),
            split_dims={"embed": {"model.width": self.width}},
            layer_outputs=0,
            layer_outputs_rule="no layer before the output",
            widest_activation=self.width,
        )


class Scales(Model):
    def parameters(self):
        return {"factors": Parameter(shape=(self.config.width,), dims=("embed",), initial="ones")}

    def loss(self, parameters, state, batch, context):
        factors = context.gather(parameters["factors"], "embed", wide=True)
        error = batch["inputs"] @ factors - batch["targets"]
        return jnp.mean(jnp.square(context.pin(error, "batch"))), Outcome({}, {})


class RunOfScales(RunConfig):
    model: Annotated[ScalesModel, Field()]


def test_a_new_kind_of_model_needs_its_record_its_class_and_one_line(mesh, monkeypatch):
    monkeypatch.setitem(MODELS, ScalesModel, Scales)
    config = RunOfScales.model_validate(
        {
            "name": "toy",
            "model": {"kind": "scales", "width": 8},
            "data": {"source": "synthetic"},
            "optimizer": {"kind": "sgd", "learning_rate": 0.1},
            "precision": "fp32",
            "batch": {"sequences": 8},
        }
    )
    check_layout(config, Layout.parse("data=2,fsdp=4"))
    with pytest.raises(InputError, match=r"model.width = 8 does not divide over fsdp = 3"):
        check_layout(config, Layout.parse("fsdp=3"))
    with pytest.raises(InputError, match=r"model.kind = 'scales', but stage = 2 splits the layers"):
        check_layout(config, Layout.parse("stage=2"))
    built = build_step(config, mesh(data=2, fsdp=4))
    losses, state = run_steps(config, built, built.init(jnp.uint32(0)), 20)
    assert losses[-1] < losses[0] / 10
    assert state["parameters"]["factors"].sharding.shard_shape((8,)) == (2,)
