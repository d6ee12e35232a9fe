"""Build a model from the `model` section of a config."""

from __future__ import annotations

from ..config import CruncherModel, LeNetModel, LinearModel, ResNetModel, TransformerModel
from ._base import Model
from .linear import Cruncher, Linear
from .transformer import Transformer
from .vision import LeNet, ResNet


def model_of(config: LinearModel | CruncherModel | LeNetModel | ResNetModel | TransformerModel) -> Model:
    """Return the model that a config's `model` section describes."""
    match config:
        case LinearModel():
            return Linear(config)
        case CruncherModel():
            return Cruncher(config)
        case LeNetModel():
            return LeNet()
        case ResNetModel():
            return ResNet(config)
        case TransformerModel():
            return Transformer(config)
