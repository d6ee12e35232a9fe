"""The optimizers and the schedules of their learning rate.

Every optimizer's state is in fp32. Where `weight_decay` is decoupled, a step takes learning rate x
`weight_decay` x parameter away; `weight_decay_on` says from which parameters: "matrices" spares norms and
biases, "all" spares none.
A schedule's `scale` says how the learning rate follows the batch: docs/optimizers.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ._base import (
    Fraction,
    NotNegative,
    NotNegativeFloat,
    OptionalPositiveFloat,
    Positive,
    PositiveFloat,
    Problem,
    Section,
    Share,
    raise_problems,
)

DecayOn = Literal["matrices", "all"]
Scale = Literal["none", "linear", "sqrt"]
"""How the learning rate follows the batch: not at all, in proportion, or as its square root."""


class SGDOptimizer(Section):
    """Stochastic gradient descent; one moment per parameter if `momentum` > 0, else none.

    `nesterov`: the gradient is looked at where momentum will have carried the parameters.
    `weight_decay`: times the parameter, added to its gradient before momentum (as PyTorch does).
    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["sgd"]
    learning_rate: PositiveFloat
    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NotNegativeFloat = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: OptionalPositiveFloat = None

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> SGDOptimizer:
        _check_nesterov(self.nesterov, self.momentum)
        return self


class AdaGradOptimizer(Section):
    """AdaGrad: each gradient divided by the root of the sum of its squares so far; one moment each.

    The sum starts from zero, and `epsilon` is added to it under the root.
    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["adagrad"]
    learning_rate: PositiveFloat
    epsilon: PositiveFloat = 1e-5
    clip_norm: OptionalPositiveFloat = None


class RMSPropOptimizer(Section):
    """RMSProp: each gradient divided by the root of a running mean of its squares; one moment each.

    `decay`: of that mean, which starts from zero. `epsilon`: added to the root. `centered`: the square of a
    running mean of the gradient is taken away under the root, one moment more. `momentum` > 0: of the
    divided gradients, one moment more, with `nesterov` if wished.
    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["rmsprop"]
    learning_rate: PositiveFloat
    decay: Fraction = 0.99
    epsilon: PositiveFloat = 1e-8
    centered: bool = False
    momentum: Fraction = 0.0
    nesterov: bool = False
    clip_norm: OptionalPositiveFloat = None

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> RMSPropOptimizer:
        _check_nesterov(self.nesterov, self.momentum)
        return self


class AdamOptimizer(Section):
    """Adam without weight decay; two moments per parameter.

    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["adam"]
    learning_rate: PositiveFloat
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: PositiveFloat = 1e-8
    clip_norm: OptionalPositiveFloat = None


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
    weight_decay_on: DecayOn = "matrices"
    clip_norm: OptionalPositiveFloat = None


class LionOptimizer(Section):
    """Lion: the sign of a mix of gradient and momentum, with decoupled weight decay; one moment each.

    `beta1`: the momentum's share of what is stepped along; `beta2`: the momentum's own decay. Every number
    moves by the learning rate, so it wants one that is 3 to 10 times smaller than AdamW's, and
    `weight_decay` as much larger (Chen et al. 2023).
    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["lion"]
    learning_rate: PositiveFloat
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    weight_decay: NotNegativeFloat = 0.1
    weight_decay_on: DecayOn = "matrices"
    clip_norm: OptionalPositiveFloat = None


class AdafactorOptimizer(Section):
    """Adafactor: of a matrix's squared gradients only the means of rows and of columns are kept.

    Matrices are those of single layers, the dims that a product sums over on one side and the others on the
    other. One whose smaller side is below `least_factored` keeps a whole moment, as do vectors.
    `decay_exponent`: the mean's decay at step t is 1 - t^-decay_exponent. `clip_rms`: the root mean square
    above which the update of one array is scaled down; None never does. `scale_by_parameter`: updates are
    multiplied by the root mean square of their parameter, 1e-3 at least, so that the learning rate is
    relative. `momentum` > 0: of the updates, one moment more. `weight_decay`: decoupled.
    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["adafactor"]
    learning_rate: PositiveFloat
    decay_exponent: Annotated[float, Field(gt=0, le=1)] = 0.8
    least_factored: Positive = 128
    clip_rms: OptionalPositiveFloat = 1.0
    scale_by_parameter: bool = True
    momentum: Fraction = 0.0
    weight_decay: NotNegativeFloat = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: OptionalPositiveFloat = None


class MuonOptimizer(Section):
    """Muon: the momentum of each hidden matrix, made nearly orthogonal; AdamW for everything else.

    Hidden matrices are those of single layers; tables, heads, norms and biases are AdamW's. One moment for
    a hidden matrix, two for the rest. `momentum`, `nesterov`: of the matrices. `newton_schulz_steps`:
    iterations that make it orthogonal. `update_rms`: the root mean square of a matrix's update at a learning
    rate of one, whatever its shape; 0.2 is what AdamW's updates have, so that one learning rate and
    `weight_decay` serve both (Liu et al. 2025). None scales by sqrt(max(1, outputs / inputs)) instead, as
    the original does. `adamw_*`: of the rest. `weight_decay`: decoupled, of both.
    `clip_norm`: the global gradient norm above which gradients are scaled down; None never does.
    """

    kind: Literal["muon"]
    learning_rate: PositiveFloat
    momentum: Fraction = 0.95
    nesterov: bool = True
    newton_schulz_steps: Positive = 5
    update_rms: OptionalPositiveFloat = 0.2
    adamw_beta1: Fraction = 0.9
    adamw_beta2: Fraction = 0.95
    adamw_epsilon: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.1
    weight_decay_on: DecayOn = "matrices"
    clip_norm: OptionalPositiveFloat = None

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> MuonOptimizer:
        _check_nesterov(self.nesterov, self.momentum)
        return self


def _check_nesterov(nesterov: bool, momentum: float) -> None:
    if nesterov and momentum == 0:
        what = "= true, but momentum = 0 leaves nothing to look ahead with"
        raise_problems([("nesterov", what, "set optimizer.momentum, 0.9 for one, or nesterov = false")])


class ConstantSchedule(Section):
    """The optimizer's learning rate at every step, after a linear rise from 0 over `warmup_steps`."""

    kind: Literal["constant"]
    warmup_steps: NotNegative = 0
    scale: Scale = "none"


class CosineSchedule(Section):
    """Linear from 0 over `warmup_steps`, then half a cosine to `final_fraction` at `RunConfig.steps`."""

    kind: Literal["cosine"]
    warmup_steps: NotNegative
    final_fraction: Share = 0.1
    scale: Scale = "none"


class LinearSchedule(Section):
    """Linear from 0 over `warmup_steps`, then linear to `final_fraction` at `RunConfig.steps`."""

    kind: Literal["linear"]
    warmup_steps: NotNegative
    final_fraction: Share = 0.0
    scale: Scale = "none"


class StableSchedule(Section):
    """Linear from 0 over `warmup_steps`, the full rate, then linear to `final_fraction` over the last
    `decay_steps` of `RunConfig.steps`."""

    kind: Literal["stable-then-decay"]
    warmup_steps: NotNegative
    decay_steps: Positive
    final_fraction: Share = 0.0
    scale: Scale = "none"


class InverseRootSchedule(Section):
    """Linear from 0 over `warmup_steps`, then as the inverse square root: half at 4 x `warmup_steps`."""

    kind: Literal["inverse-square-root"]
    warmup_steps: Positive
    scale: Scale = "none"


def schedule_problems(schedule: Schedule, steps: int) -> list[Problem]:
    """Phases of a schedule that do not find room in a run of `steps`; paths from the run."""
    if isinstance(schedule, StableSchedule):
        phases, left = schedule.warmup_steps + schedule.decay_steps, steps - schedule.warmup_steps
        if phases <= steps:
            return []
        if left > 0:
            what = f"= {schedule.decay_steps} after schedule.warmup_steps = {schedule.warmup_steps} is longer"
            hint = f"use at most schedule.decay_steps = {left}"
            return [("schedule.decay_steps", f"{what} than steps = {steps}", hint)]
    warmup = schedule.warmup_steps
    if warmup < steps or isinstance(schedule, ConstantSchedule | InverseRootSchedule):
        return []
    what = f"= {warmup} leaves nothing of steps = {steps}"
    return [("schedule.warmup_steps", what, f"use at most schedule.warmup_steps = {steps - 1}")]


Optimizer = Annotated[
    AdamWOptimizer
    | SGDOptimizer
    | AdaGradOptimizer
    | RMSPropOptimizer
    | AdamOptimizer
    | LionOptimizer
    | AdafactorOptimizer
    | MuonOptimizer,
    Field(discriminator="kind"),
]
Schedule = Annotated[
    ConstantSchedule | CosineSchedule | LinearSchedule | StableSchedule | InverseRootSchedule,
    Field(discriminator="kind"),
]
