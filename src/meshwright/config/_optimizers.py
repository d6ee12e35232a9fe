"""The optimizers and the schedules of their learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ._base import (
    Fraction,
    NotNegative,
    NotNegativeFloat,
    OptionalPositiveFloat,
    PositiveFloat,
    Section,
    Share,
)


class AdamWOptimizer(Section):
    """Adam with decoupled weight decay; two moments per parameter.

    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["adamw"]
    learning_rate: PositiveFloat
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.1
    clip_norm: OptionalPositiveFloat = None


class SGDOptimizer(Section):
    """Stochastic gradient descent; one accumulator per parameter if `momentum` > 0, else none.

    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["sgd"]
    learning_rate: PositiveFloat
    momentum: Fraction = 0.0
    clip_norm: OptionalPositiveFloat = None


class AdaGradOptimizer(Section):
    """AdaGrad: each gradient divided by the root of the sum of its squares so far; one accumulator each.

    The accumulator starts from zero, and `epsilon` is added to it under the root.
    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["adagrad"]
    learning_rate: PositiveFloat
    epsilon: PositiveFloat = 1e-5
    clip_norm: OptionalPositiveFloat = None


class ConstantSchedule(Section):
    """The optimizer's learning rate at every step."""

    kind: Literal["constant"]


class CosineSchedule(Section):
    """Linear from 0 over `warmup_steps`, then half a cosine to `final_fraction` at `RunConfig.steps`."""

    kind: Literal["cosine"]
    warmup_steps: NotNegative
    final_fraction: Share = 0.1


Optimizer = Annotated[AdamWOptimizer | SGDOptimizer | AdaGradOptimizer, Field(discriminator="kind")]
Schedule = Annotated[ConstantSchedule | CosineSchedule, Field(discriminator="kind")]
