"""Declare the optimizers: of each its settings, its update, and the moments that it keeps; and the schedules.

To add one, write its class here and name it in `Optimizer`, below the last. The configuration, the step, the
ledger, the plan's estimates and the pages read it from here. An update imports Optax when it is made, for the
configuration is read without jax. The parameters reach it as `Parameters`, which the step provides.
"""

# pyright: basic

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self

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

if TYPE_CHECKING:
    import optax

Tree = Any
Kept = Literal["parameters", "hidden", "others", "vectors", "sides"]
"""The parameters that a moment has a number for: all, those of hidden matrices, all others, or vectors alone
(norms and biases). Or it has one for each row or column of a matrix."""
_GROUPS: dict[Kept, tuple[str, ...]] = {
    "parameters": ("hidden", "tables", "vectors"),
    "hidden": ("hidden",),
    "others": ("tables", "vectors"),
    "vectors": ("vectors",),
    "sides": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment that an optimizer keeps: its name in the ledger, and what it has a number for.

    `signed`: it may be negative. A running mean of squares is not.
    """

    name: str
    each: Kept = "parameters"
    signed: bool = True


class Parameters(Protocol):
    """The parameters that an update is for, as the step knows them; trees have their structure.

    `decayed` is true where weight decay falls.
    """

    @property
    def decayed(self) -> Tree: ...

    def split(self, hidden: Callable[[Any], Any], other: Any) -> Tree:
        """Return `hidden(parameter)` for each hidden matrix, and `other` for all other parameters."""
        ...

    def sizes(self, parameter: Any) -> tuple[int, int]:
        """Return the numbers of inputs and of outputs of a parameter's matrices."""
        ...

    def orthogonal(self, matrices: Tree, num_steps: int) -> Tree:
        """Return hidden matrices made nearly orthogonal, each layer's matrix by itself."""
        ...

    def by_matrix(self, update: optax.GradientTransformation) -> optax.GradientTransformation:
        """Wrap an update to see each layer's matrices and vectors as arrays of their own."""
        ...


class OptimizerSection(Section):
    """The base of the optimizers."""

    elsewhere: ClassVar[str] = ""
    """Name the optimizer as other programs do; a message says which of ours is meant."""
    by_number: ClassVar[bool] = True
    """Say whether a number's update needs only its own gradient and moments, once gradients are clipped."""

    def moments(self) -> tuple[Moment, ...]:
        """Return the moments that are kept, in the order of the ledger."""
        raise NotImplementedError

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        """Return the update for a learning rate of 1, which the step multiplies by the actual one."""
        raise NotImplementedError

    def numbers_kept(self) -> dict[str, int]:
        """Return the moments' numbers for each parameter of hidden matrices, of tables and of vectors.

        Rows and columns of matrices are left out: they are few.

        >>> LionOptimizer(kind="lion", learning_rate=1e-4).numbers_kept()
        {'hidden': 1, 'tables': 1, 'vectors': 1}
        """
        groups = [group for moment in self.moments() for group in _GROUPS[moment.each]]
        return {group: groups.count(group) for group in _GROUPS["parameters"]}

    @property
    def kept_alike(self) -> int | None:
        """The moments' numbers for each parameter, or None if parameters differ."""
        counts = set(self.numbers_kept().values())
        varies = any(moment.each == "sides" for moment in self.moments())
        return None if varies or len(counts) > 1 else counts.pop()


DecayOn = Annotated[
    Literal["matrices", "all"],
    Field(
        description="Parameters that weight decay falls on.\n`matrices` leaves out norms and biases.\n"
        "Effect: the parameters that are pulled to zero."
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


class NesterovOptimizer(OptimizerSection):
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

    elsewhere = "momentum nesterov"
    kind: Literal["sgd"]
    """Update rule. Effect: no moments without momentum: 4 bytes a parameter for the parameters alone."""
    learning_rate: LearningRate
    momentum: Momentum = 0.0
    nesterov: Nesterov = False
    weight_decay: CoupledDecay = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None

    def moments(self) -> tuple[Moment, ...]:
        return (Moment(name="trace"),) if self.momentum else ()

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        import optax

        update = optax.sgd(1.0, momentum=self.momentum or None, nesterov=self.nesterov)
        return _with_coupled_decay(update, self.weight_decay, parameters)


class AdaGradOptimizer(OptimizerSection):
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

    def moments(self) -> tuple[Moment, ...]:
        return (Moment(name="sum_of_squares", signed=False),)

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        import optax

        if self.epsilon_under_root:
            update = optax.adagrad(1.0, initial_accumulator_value=0.0, eps=self.epsilon)
        else:
            update = _adagrad_of_pytorch(self.epsilon)
        return _with_coupled_decay(update, self.weight_decay, parameters)


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

    def moments(self) -> tuple[Moment, ...]:
        mean = (Moment(name="mu"),) if self.centered else ()
        trace = (Moment(name="trace"),) if self.momentum else ()
        return (*mean, Moment(name="nu", signed=False), *trace)

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        import optax

        update = optax.rmsprop(
            1.0, decay=self.decay, eps=self.epsilon, eps_in_sqrt=False, centered=self.centered,
            momentum=self.momentum or None, nesterov=self.nesterov,
        )  # fmt: skip
        return _with_coupled_decay(update, self.weight_decay, parameters)


class AdamOptimizer(OptimizerSection):
    """Adam, whose weight decay is part of the gradient; two moments per parameter."""

    elsewhere = "fused-adam"
    kind: Literal["adam"]
    """Update rule. Effect: two moments, 8 bytes a parameter."""
    learning_rate: LearningRate
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.999
    epsilon: Epsilon = 1e-8
    weight_decay: CoupledDecay = 0.0
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None

    def moments(self) -> tuple[Moment, ...]:
        return Moment(name="mu"), Moment(name="nu", signed=False)

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        import optax

        update = optax.adam(1.0, b1=self.beta1, b2=self.beta2, eps=self.epsilon)
        return _with_coupled_decay(update, self.weight_decay, parameters)


class AdamWOptimizer(OptimizerSection):
    """Adam with decoupled weight decay; two moments per parameter."""

    elsewhere = (
        "adamw-torch adamw-torch-fused adamw-8bit adamw-bnb-8bit adamw-torch-8bit paged-adamw-8bit "
        "paged-adamw-32bit"
    )
    kind: Literal["adamw"]
    """Update rule. Effect: two moments, 8 bytes a parameter."""
    learning_rate: LearningRate
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.95
    epsilon: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.1
    weight_decay_on: DecayOn = "matrices"
    clip_norm: ClipNorm = None

    def moments(self) -> tuple[Moment, ...]:
        return Moment(name="mu"), Moment(name="nu", signed=False)

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        import optax

        b1, b2, decay = self.beta1, self.beta2, self.weight_decay
        return optax.adamw(1.0, b1=b1, b2=b2, eps=self.epsilon, weight_decay=decay, mask=parameters.decayed)


class LionOptimizer(OptimizerSection):
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

    def moments(self) -> tuple[Moment, ...]:
        return (Moment(name="mu"),)

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        import optax

        b1, b2, decay = self.beta1, self.beta2, self.weight_decay
        return optax.lion(1.0, b1=b1, b2=b2, weight_decay=decay, mask=parameters.decayed)


class AdafactorOptimizer(OptimizerSection):
    """Adafactor: of a matrix's squared gradients only the means of rows and of columns are kept.

    Matrices are those of single layers, the dims that a product sums over on one side and the others on the
    other. Vectors keep a whole moment.
    """

    by_number = False

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

    def moments(self) -> tuple[Moment, ...]:
        sides = (
            Moment(name="v_row", each="sides", signed=False),
            Moment(name="v_col", each="sides", signed=False),
        )
        mean = (Moment(name="ema"),) if self.momentum else ()
        return (*sides, Moment(name="v", each="vectors", signed=False), *mean)

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        """Chain the parts of `optax.adafactor`, applying those that use a whole array to each layer.

        On stacked layers, `optax.adafactor` would factor the two longest dims, whichever those are, and take
        root mean squares over all layers together.
        """
        import optax

        rate, least = self.decay_exponent, self.least_factored
        parts = [optax.scale_by_factored_rms(decay_rate=rate, min_dim_size_to_factor=least)]
        if self.clip_rms is not None:
            parts.append(optax.clip_by_block_rms(self.clip_rms))
        if self.scale_by_parameter:
            parts.append(optax.scale_by_param_block_rms())
        return optax.chain(
            parameters.by_matrix(optax.chain(*parts)),
            optax.ema(self.momentum, debias=False) if self.momentum else optax.identity(),
            optax.add_decayed_weights(self.weight_decay, parameters.decayed),
            optax.scale(-1.0),
        )


class MuonOptimizer(NesterovOptimizer):
    """Muon: the momentum of each hidden matrix, made nearly orthogonal; AdamW for everything else.

    Hidden matrices are those of single layers; tables, heads, norms and biases are AdamW's. One moment for
    a hidden matrix, two for the rest.
    """

    by_number = False

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
    newton_schulz_format: Literal["fp32", "bf16"] = "fp32"
    """Format of the iterations, and of the matrices on their way to the device that runs them.
    `bf16` is that of the original and of PyTorch.
    Effect: `bf16` runs the products at twice the rate, and halves what the optimizer sends."""
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

    def moments(self) -> tuple[Moment, ...]:
        of_adamw = (
            Moment(name="adamw.mu", each="others"),
            Moment(name="adamw.nu", each="others", signed=False),
        )
        return (*of_adamw, Moment(name="muon.mu", each="hidden"))

    def update(self, parameters: Parameters) -> optax.GradientTransformation:
        """Return Muon as `optax.contrib.muon` has it, with orthogonalisation divided over the devices."""
        import jax
        import jax.numpy as jnp
        import optax

        def scale(parameter: Any) -> float:
            inputs, outputs = parameters.sizes(parameter)
            if self.update_rms is None:  # Jordan 2024
                return math.sqrt(max(1.0, outputs / inputs))
            return self.update_rms * math.sqrt(max(inputs, outputs))

        beta, scales = self.momentum, parameters.split(scale, optax.MaskedNode())

        def init(params: Tree) -> MuonState:
            return MuonState(count=jnp.zeros([], jnp.int32), mu=jax.tree.map(jnp.zeros_like, params))

        def apply(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
            count = optax.safe_increment(state.count)
            mu = optax.tree.update_moment(updates, state.mu, beta, 1)
            mean = optax.tree.bias_correction(mu, beta, count)
            if self.nesterov:  # both parts are corrected for their start from zero
                later = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
                now = optax.tree.bias_correction(updates, beta, count)
                mean = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, later, now)
            narrow = jnp.float32 if self.newton_schulz_format == "fp32" else jnp.bfloat16
            mean = jax.tree.map(lambda x: x.astype(narrow), mean)
            changes = parameters.orthogonal(mean, self.newton_schulz_steps)
            changes = jax.tree.map(lambda x: x.astype(jnp.float32), changes)
            return jax.tree.map(jnp.multiply, changes, scales), MuonState(count=count, mu=mu)

        orthogonal = optax.GradientTransformation(init, apply)
        adam = optax.scale_by_adam(b1=self.adamw_beta1, b2=self.adamw_beta2, eps=self.adamw_epsilon)
        kinds = parameters.split(lambda _: "muon", "adamw")
        return optax.chain(
            optax.partition({"muon": orthogonal, "adamw": adam}, kinds),
            optax.add_decayed_weights(self.weight_decay, parameters.decayed),
            optax.scale(-1.0),
        )


class MuonState(NamedTuple):
    """The state of the hidden matrices under Muon: a count of steps, and the momentum."""

    count: Any
    mu: Any


def _with_coupled_decay(
    update: optax.GradientTransformation, weight_decay: float, parameters: Parameters
) -> optax.GradientTransformation:
    """Add `weight_decay` x parameter to the gradients before `update`, as PyTorch does."""
    import optax

    decay = optax.add_decayed_weights(weight_decay, parameters.decayed) if weight_decay else optax.identity()
    return optax.chain(decay, update)


def _adagrad_of_pytorch(epsilon: float) -> optax.GradientTransformation:
    """Return `torch.optim.Adagrad`, which adds epsilon to the root; Optax can only add it under the root."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(params: Tree) -> Any:
        return optax.ScaleByRssState(sum_of_squares=jax.tree.map(jnp.zeros_like, params))

    def apply(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        sums = jax.tree.map(lambda total, g: total + g * g, state.sum_of_squares, updates)
        changes = jax.tree.map(lambda g, total: -g / (jnp.sqrt(total) + epsilon), updates, sums)
        return changes, optax.ScaleByRssState(sum_of_squares=sums)

    return optax.GradientTransformation(init, apply)


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


Scale = Annotated[
    Literal["none", "linear", "sqrt"],
    Field(
        description="Rule by which the learning rate follows the batch.\n"
        "Effect: `linear` multiplies the rate by batch / `batch.base_sequences`, `sqrt` by the root of that."
    ),
]
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


Schedule = Annotated[
    ConstantSchedule | CosineSchedule | LinearSchedule | StableSchedule | InverseRootSchedule,
    Field(discriminator="kind"),
]
