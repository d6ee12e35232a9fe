import pytest

from meshwright.config import load_config
from meshwright.models import model_of
from meshwright.models.linear import Cruncher, Linear
from meshwright.models.transformer import Transformer
from meshwright.models.vision import LeNet, ResNet


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
