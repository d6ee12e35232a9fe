"""From a config's model section to the model."""

from __future__ import annotations

from ..config import CruncherModel, LeNetModel, LinearModel, TransformerModel
from ._base import Model
from .cruncher import Cruncher
from .lenet import LeNet
from .linear import Linear
from .transformer import Transformer


def model_of(config: LinearModel | CruncherModel | LeNetModel | TransformerModel) -> Model:
    """The model that a config's `model` section describes."""
    match config:
        case LinearModel():
            return Linear(config)
        case CruncherModel():
            return Cruncher(config)
        case LeNetModel():
            return LeNet()
        case TransformerModel():
            return Transformer(config)
