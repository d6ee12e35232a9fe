from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import pytest
from pydantic import Field

from meshwright.config import Layout, ModelKind, ModelSizes, RunConfig, check_layout, load_config
from meshwright.data import open_data
from meshwright.errors import InputError
from meshwright.models import MODELS, Outcome, Parameter, model_of
from meshwright.models.linear import Cruncher, Linear
from meshwright.models.transformer import Transformer
from meshwright.models.vision import LeNet, ResNet
from meshwright.step import build_step


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
    assert preset == "lenet" or model.config is config  # its sizes are fixed: there is nothing to keep


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


class Scales:
    def __init__(self, config):
        self.config = config

    def parameters(self):
        return {"factors": Parameter(shape=(self.config.width,), dims=("embed",), initial="ones")}

    def state(self):
        return {}

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
    built, data = build_step(config, mesh(data=2, fsdp=4)), open_data(config)
    state, losses = built.init(jnp.uint32(0)), []
    for step in range(20):
        batch = jax.tree.map(
            lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding),
            data.batch(step, "train"),
            built.batch,
        )
        state, metrics = built.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 10
    assert state["parameters"]["factors"].sharding.shard_shape((8,)) == (2,)
