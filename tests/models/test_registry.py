import pytest

from meshwright.config import load_config
from meshwright.models import model_of
from meshwright.models.cruncher import Cruncher
from meshwright.models.linear import Linear
from meshwright.models.transformer import Transformer


@pytest.mark.parametrize(
    ("preset", "kind"), [("linear", Linear), ("cruncher", Cruncher), ("llama3-8b", Transformer)]
)
def test_each_kind_of_config_has_its_model(preset, kind):
    config = load_config(preset).model
    model = model_of(config)
    assert type(model) is kind
    assert model.config is config
