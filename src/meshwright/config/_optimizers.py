"""Define the optimizers and the schedules of their learning rate.

The state of every optimizer is in fp32. docs/explanation/optimizers.md compares them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ._section import (
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

DecayOn = Annotated[
    Literal["matrices", "all"],
    Field(
        description="Parameters that weight decay falls on.\n`matrices` leaves out norms and biases.\n"
        "Effect: the parameters that are pulled to zero."
    ),
]
Scale = Annotated[
    Literal["none", "linear", "sqrt"],
    Field(
        description="Rule by which the learning rate follows the batch.\n"
        "Effect: `linear` multiplies the rate by batch / `batch.base_sequences`, `sqrt` by the root of that."
    ),
]
LearningRate = Annotated[
    PositiveFloat,
    Field(
        description="Peak learning rate, which the schedule multiplies.\n"
        "Effect: the size of every update; nothing that is weighed.\nUnit: none"
    ),
]
ClipNorm = Annotated[
    OptionalPositiveFloat,
    Field(
        description="Global norm above which all gradients are scaled down together.\n"
        "Effect: bounds the update after an unlucky batch; `none` never scales.\n"
        "Unit: none"
    ),
]
WeightDecay = Annotated[
    NotNegativeFloat,
    Field(
        description="Weight decay: a step subtracts learning rate x this x parameter.\n"
        "It is decoupled from the gradient.\n"
        "Effect: pulls parameters to zero; nothing that is weighed.\nUnit: none"
    ),
]
CoupledDecay = Annotated[
    NotNegativeFloat,
    Field(
        description="Weight decay that is not decoupled: this x parameter is added to the gradient.\n"
        "It is added before any moment, as in PyTorch.\n"
        "Effect: pulls parameters to zero; nothing that is weighed.\nUnit: none"
    ),
]
Beta1 = Annotated[
    Fraction,
    Field(
        description="Decay of the first moment, the running mean of gradients.\n"
        "Effect: larger values average over more steps.\nUnit: share kept per step"
    ),
]
Beta2 = Annotated[
    Fraction,
    Field(
        description="Decay of the second moment, the running mean of squared gradients.\n"
        "Effect: larger values average over more steps.\nUnit: share kept per step"
    ),
]
Epsilon = Annotated[
    PositiveFloat,
    Field(
        description="Number added to the root of the second moment.\n"
        "Effect: bounds the update where gradients are tiny.\nUnit: none"
    ),
]
Momentum = Annotated[
    Fraction,
    Field(
        description="Decay of the momentum; 0 keeps none.\n"
        "Effect: above 0 it costs one moment more, 4 bytes a parameter.\nUnit: share kept per step"
    ),
]
Nesterov = Annotated[
    bool,
    Field(
        description="Take the gradient's step from where momentum will have carried the parameters.\n"
        "Effect: the direction of updates; no memory. It needs `momentum` above 0."
    ),
]


class NesterovOptimizer(Section):
    """The base of the optimizers with `nesterov`, which needs `momentum` above 0."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        nesterov, momentum = getattr(self, "nesterov", False), getattr(self, "momentum", 0)
        if nesterov and momentum == 0:
            what = "= true, but momentum = 0 leaves no momentum to look ahead with"
            hint = "set optimizer.momentum, for example to 0.9, or nesterov = false"
            raise_problems([("nesterov", what, hint)])
        return self


class SGDOptimizer(NesterovOptimizer):
    """Stochastic gradient descent; one moment per parameter if `momentum` > 0, else none."""

    kind: Literal["sgd"]
    """Update rule. Effect: no moments without momentum: 4 bytes a parameter for the parameters alone."""
    learning_rate: LearningRate
    momentum: Momentum = 0.0
    nesterov: Nesterov = False
    weight_decay: CoupledDecay = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None


class AdaGradOptimizer(Section):
    """AdaGrad: each gradient divided by the root of the sum of its squares so far; one moment each.

    The sum starts from zero. By default it is `torch.optim.Adagrad`.
    """

    kind: Literal["adagrad"]
    """Update rule. Effect: one moment, 4 bytes a parameter."""
    learning_rate: LearningRate
    epsilon: PositiveFloat = 1e-10
    """Number added to the root of the sum of squares.
    Effect: bounds the update where gradients are tiny. Unit: none"""
    epsilon_under_root: bool = False
    """Add `epsilon` to the sum of squares instead, as Optax and many lecture notes do, often with 1e-5.
    Effect: smaller first updates where gradients are small."""
    weight_decay: CoupledDecay = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None


class RMSPropOptimizer(NesterovOptimizer):
    """RMSProp: each gradient divided by the root of a running mean of its squares; one moment each."""

    kind: Literal["rmsprop"]
    """Update rule. Effect: one moment, 4 bytes a parameter; `centered` and `momentum` add one each."""
    learning_rate: LearningRate
    decay: Fraction = 0.99
    """Decay of the running mean of squared gradients, which starts from zero.
    Effect: larger values average over more steps. Unit: share kept per step"""
    epsilon: Epsilon = 1e-8
    centered: bool = False
    """Subtract the square of the mean gradient under the root.
    Effect: one moment more, 4 bytes a parameter."""
    momentum: Momentum = 0.0
    nesterov: Nesterov = False
    weight_decay: CoupledDecay = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None


class AdamOptimizer(Section):
    """Adam, whose weight decay is part of the gradient; two moments per parameter."""

    kind: Literal["adam"]
    """Update rule. Effect: two moments, 8 bytes a parameter."""
    learning_rate: LearningRate
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.999
    epsilon: Epsilon = 1e-8
    weight_decay: CoupledDecay = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None


class AdamWOptimizer(Section):
    """Adam with decoupled weight decay; two moments per parameter."""

    kind: Literal["adamw"]
    """Update rule. Effect: two moments, 8 bytes a parameter."""
    learning_rate: LearningRate
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.95
    epsilon: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.1
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None


class LionOptimizer(Section):
    """Lion: the sign of a mix of gradient and momentum, with decoupled weight decay; one moment each.

    Every number moves by the learning rate, so it wants one that is 3 to 10 times smaller than AdamW's, and
    `weight_decay` as much larger (Chen et al. 2023, https://arxiv.org/abs/2302.06675).
    """

    kind: Literal["lion"]
    """Update rule. Effect: one moment, 4 bytes a parameter."""
    learning_rate: LearningRate
    beta1: Fraction = 0.9
    """Share of the momentum in the direction of the step.
    Effect: smaller values follow the newest gradient more. Unit: share"""
    beta2: Fraction = 0.99
    """Decay of the momentum. Effect: larger values average over more steps. Unit: share kept per step"""
    weight_decay: WeightDecay = 0.1
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None


class AdafactorOptimizer(Section):
    """Adafactor: of a matrix's squared gradients only the means of rows and of columns are kept.

    Matrices are those of single layers, the dims that a product sums over on one side and the others on the
    other. Vectors keep a whole moment.
    """

    kind: Literal["adafactor"]
    """Update rule. Effect: a row and a column for each matrix in place of 8 bytes a parameter."""
    learning_rate: LearningRate
    decay_exponent: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Exponent of the mean's decay: at step t that is 1 - t^-decay_exponent.
    Effect: larger values average over more steps. Unit: none"""
    least_factored: Positive = 128
    """Smallest side of a matrix that is kept as rows and columns; smaller ones keep a whole moment.
    Effect: larger values keep more moments whole, 4 bytes a parameter. Unit: rows or columns"""
    clip_rms: OptionalPositiveFloat = 1.0
    """Root mean square above which the update of one array is scaled down; `none` never does.
    Effect: bounds large updates. Unit: none"""
    scale_by_parameter: bool = True
    """Multiply updates by the root mean square of their parameter, 1e-3 at least.
    Effect: makes the learning rate relative to the parameters."""
    momentum: Momentum = 0.0
    weight_decay: WeightDecay = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None


class MuonOptimizer(NesterovOptimizer):
    """Muon: the momentum of each hidden matrix, made nearly orthogonal; AdamW for everything else.

    Hidden matrices are those of single layers; tables, heads, norms and biases are AdamW's. One moment for
    a hidden matrix, two for the rest.
    """

    kind: Literal["muon"]
    """Update rule.
    Effect: 4 bytes a parameter for hidden matrices, 8 for the rest; each step multiplies matrices more."""
    learning_rate: LearningRate
    momentum: Fraction = 0.95
    """Decay of the matrices' momentum.
    Effect: larger values average over more steps. Unit: share kept per step"""
    nesterov: Nesterov = True
    newton_schulz_steps: Positive = 5
    """Iterations that make the momentum of a matrix orthogonal.
    Effect: each adds three products of matrices to the optimizer's FLOPs. Unit: iterations"""
    update_rms: OptionalPositiveFloat = 0.2
    """Root mean square of a matrix's update at a learning rate of one, whatever its shape.
    0.2 is that of AdamW's updates, so that one learning rate and `weight_decay` serve both (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982). `none` scales by sqrt(max(1, outputs / inputs)), as the original does.
    Effect: the size of updates of hidden matrices. Unit: none"""
    adamw_beta1: Beta1 = 0.9
    adamw_beta2: Beta2 = 0.95
    adamw_epsilon: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.1
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None


Warmup = Annotated[
    NotNegative,
    Field(
        description="Steps in which the learning rate rises linearly from 0 to its peak.\n"
        "Effect: the size of the first updates; nothing that is weighed.\nUnit: steps"
    ),
]
FinalFraction = Annotated[
    Share,
    Field(
        description="Learning rate of the last step as a share of the peak.\n"
        "Effect: the size of the last updates; nothing that is weighed.\nUnit: share"
    ),
]


class ConstantSchedule(Section):
    """The optimizer's learning rate at every step, after a linear rise from 0 over `warmup_steps`."""

    kind: Literal["constant"]
    """Course of the learning rate after its rise. Effect: it stays; `steps` may be changed at any time."""
    warmup_steps: Warmup = 0
    scale: Scale = "none"


class CosineSchedule(Section):
    """Linear from 0 over `warmup_steps`, then half a cosine to `final_fraction` at the run's `steps`."""

    kind: Literal["cosine"]
    """Course of the learning rate after its rise. Effect: it falls as half a cosine until `steps`."""
    warmup_steps: Warmup
    final_fraction: FinalFraction = 0.1
    scale: Scale = "none"


class LinearSchedule(Section):
    """Linear from 0 over `warmup_steps`, then linear to `final_fraction` at the run's `steps`."""

    kind: Literal["linear"]
    """Course of the learning rate after its rise. Effect: it falls in a straight line until `steps`."""
    warmup_steps: Warmup
    final_fraction: FinalFraction = 0.0
    scale: Scale = "none"


class StableSchedule(Section):
    """Linear from 0 over `warmup_steps`, the full rate, then linear to `final_fraction` over the last
    `decay_steps` of the run's `steps`."""

    kind: Literal["stable-then-decay"]
    """Course of the learning rate after its rise.
    Effect: it stays, then falls in a straight line; known as warmup-stable-decay (WSD)."""
    warmup_steps: Warmup
    decay_steps: Positive
    """Last steps of the run, over which the learning rate falls.
    Effect: how long the rate stays at its peak. Unit: steps"""
    final_fraction: FinalFraction = 0.0
    scale: Scale = "none"


class InverseRootSchedule(Section):
    """Linear from 0 over `warmup_steps`, then as the inverse square root: half at 4 x `warmup_steps`."""

    kind: Literal["inverse-square-root"]
    """Course of the learning rate after its rise.
    Effect: it falls as sqrt(warmup_steps / step), whatever `steps` is."""
    warmup_steps: Annotated[Warmup, Field(ge=1)]
    scale: Scale = "none"


def least_steps(schedule: Schedule) -> int:
    """Return the fewest steps of a run that has room for every phase of `schedule`."""
    if isinstance(schedule, StableSchedule):
        return schedule.warmup_steps + schedule.decay_steps
    return schedule.warmup_steps + 1


def schedule_problems(schedule: Schedule, steps: int | None) -> list[Problem]:
    """Return the phases of a schedule that do not fit into `steps`; paths start at the run."""
    if steps is None:
        return []
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
    what = f"= {warmup} is not below steps = {steps}"
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
