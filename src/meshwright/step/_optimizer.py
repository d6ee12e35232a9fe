"""Build the optimizer and its learning-rate schedule from Optax parts."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..config import (
    AdafactorOptimizer,
    AdaGradOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    ConstantSchedule,
    CosineSchedule,
    InverseRootSchedule,
    LinearSchedule,
    LionOptimizer,
    MuonOptimizer,
    RMSPropOptimizer,
    RunConfig,
    SGDOptimizer,
    StableSchedule,
)
from ..models import Parameter
from ._state import by_matrix, is_hidden_matrix, is_matrix, is_parameter, matrix_dims, muon_dims

Tree = Any


def schedule_of(config: RunConfig) -> optax.Schedule:
    """Return the learning rate by step, counted from 0: a linear warmup, then the schedule's own curve."""
    peak, schedule, steps = config.peak_learning_rate, config.schedule, config.horizon_steps
    warmup = schedule.warmup_steps
    left = max(steps - warmup, 1)
    after: optax.Schedule
    match schedule:
        case ConstantSchedule():
            after = optax.constant_schedule(peak)
        case CosineSchedule():
            after = optax.cosine_decay_schedule(peak, left, alpha=schedule.final_fraction)
        case LinearSchedule():
            after = optax.linear_schedule(peak, peak * schedule.final_fraction, left)
        case StableSchedule():
            stable = steps - warmup - schedule.decay_steps
            end = peak * schedule.final_fraction
            after = optax.linear_schedule(peak, end, schedule.decay_steps, transition_begin=stable)
        case InverseRootSchedule():  # Vaswani et al. 2017: peak x sqrt(warmup / step)
            after = lambda step: peak * jnp.sqrt(warmup / (jnp.maximum(step, 0) + warmup))  # noqa: E731

    rise = optax.linear_schedule(0.0, peak, warmup)
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def optimizer_of(config: RunConfig, declared: Tree) -> optax.GradientTransformation:
    """Return the optimizer of `config` for a learning rate of 1; the step multiplies by the actual rate.

    `declared` is the model's tree of parameter declarations. By default weight decay applies to matrices and
    tables, not to norms and biases; `weight_decay_on` may extend it to all parameters.
    """
    chosen = config.optimizer
    on_all = getattr(chosen, "weight_decay_on", "matrices") == "all"
    decayed = jax.tree.map(lambda p: on_all or is_matrix(p), declared, is_leaf=is_parameter)
    match chosen:
        case SGDOptimizer():
            update = optax.chain(
                optax.add_decayed_weights(chosen.weight_decay, decayed) if chosen.weight_decay else _NOTHING,
                optax.sgd(1.0, momentum=chosen.momentum or None, nesterov=chosen.nesterov),
            )
        case AdaGradOptimizer():  # Optax adds epsilon under the root, as the config defines it
            update = optax.adagrad(1.0, initial_accumulator_value=0.0, eps=chosen.epsilon)
        case RMSPropOptimizer():
            update = optax.rmsprop(
                1.0,
                decay=chosen.decay,
                eps=chosen.epsilon,
                eps_in_sqrt=False,
                centered=chosen.centered,
                momentum=chosen.momentum or None,
                nesterov=chosen.nesterov,
            )
        case AdamOptimizer():
            update = optax.adam(1.0, b1=chosen.beta1, b2=chosen.beta2, eps=chosen.epsilon)
        case AdamWOptimizer():
            update = optax.adamw(
                1.0,
                b1=chosen.beta1,
                b2=chosen.beta2,
                eps=chosen.epsilon,
                weight_decay=chosen.weight_decay,
                mask=decayed,
            )
        case LionOptimizer():
            update = optax.lion(
                1.0, b1=chosen.beta1, b2=chosen.beta2, weight_decay=chosen.weight_decay, mask=decayed
            )
        case AdafactorOptimizer():
            update = _adafactor(chosen, declared, decayed)
        case MuonOptimizer():
            update = _muon(chosen, declared, decayed)
    clip = chosen.clip_norm
    return update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)


_NOTHING = optax.identity()


def _adafactor(chosen: AdafactorOptimizer, declared: Tree, decayed: Tree) -> optax.GradientTransformation:
    """Chain the parts of `optax.adafactor`, applying those that use a whole array to each layer separately.

    On stacked layers, `optax.adafactor` would factor the two longest dims, whichever those are, and take root
    mean squares over all layers together.
    """
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=chosen.decay_exponent, min_dim_size_to_factor=chosen.least_factored
        )
    ]
    if chosen.clip_rms is not None:
        parts.append(optax.clip_by_block_rms(chosen.clip_rms))
    if chosen.scale_by_parameter:
        parts.append(optax.scale_by_param_block_rms())
    return optax.chain(
        by_matrix(optax.chain(*parts), declared),
        optax.ema(chosen.momentum, debias=False) if chosen.momentum else _NOTHING,
        optax.add_decayed_weights(chosen.weight_decay, decayed),
        optax.scale(-1.0),
    )


def _muon(chosen: MuonOptimizer, declared: Tree, decayed: Tree) -> optax.GradientTransformation:
    """Chain the parts of `optax.contrib.muon`, which itself would pass Muon's `nesterov` to its AdamW too."""
    kinds = jax.tree.map(lambda p: "muon" if is_hidden_matrix(p) else "adamw", declared, is_leaf=is_parameter)
    numbers = jax.tree.map(
        lambda p: muon_dims(p) if is_hidden_matrix(p) else optax.MaskedNode(), declared, is_leaf=is_parameter
    )

    def scale(parameter: Parameter) -> Any:
        if not is_hidden_matrix(parameter):
            return optax.MaskedNode()
        inputs, outputs = matrix_dims(parameter).inputs_outputs(parameter.shape)
        if chosen.update_rms is None:  # Jordan 2024
            return math.sqrt(max(1.0, outputs / inputs))
        return chosen.update_rms * math.sqrt(max(inputs, outputs))

    scales = jax.tree.map(scale, declared, is_leaf=is_parameter)
    orthogonal = optax.chain(
        optax.contrib.scale_by_muon(
            ns_steps=chosen.newton_schulz_steps,
            beta=chosen.momentum,
            nesterov=chosen.nesterov,
            weight_dimension_numbers=numbers,
        ),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, scales)),
    )
    adam = optax.scale_by_adam(b1=chosen.adamw_beta1, b2=chosen.adamw_beta2, eps=chosen.adamw_epsilon)
    return optax.chain(
        optax.partition({"muon": orthogonal, "adamw": adam}, kinds),
        optax.add_decayed_weights(chosen.weight_decay, decayed),
        optax.scale(-1.0),
    )
