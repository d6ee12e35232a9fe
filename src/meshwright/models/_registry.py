"""Build a model from the `model` section of a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import CruncherModel, LeNetModel, LinearModel, ModelKind, ResNetModel, TransformerModel
from ._base import Model
from .linear import Cruncher, Linear
from .transformer import Transformer
from .vision import LeNet, ResNet

MODELS: dict[type[ModelKind], Callable[[Any], Model]] = {
    LinearModel: Linear,
    CruncherModel: Cruncher,
    LeNetModel: lambda config: LeNet(),
    ResNetModel: ResNet,
    TransformerModel: Transformer,
}
"""The model of each kind of record."""


def model_of(config: ModelKind) -> Model:
    """Return the model that a config's `model` section describes."""
    return MODELS[type(config)](config)
