"""The optimizer and its schedule, through Optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..config import AdaGradOptimizer, AdamWOptimizer, CosineSchedule, RunConfig
from ..models import Parameter


def schedule_of(config: RunConfig) -> optax.Schedule:
    """Learning rate by step: constant, or linear warm-up and cosine decay over the run's steps."""
    peak = config.optimizer.learning_rate
    match config.schedule:
        case CosineSchedule() as cosine:
            return optax.warmup_cosine_decay_schedule(
                init_value=0.0,
                peak_value=peak,
                warmup_steps=cosine.warmup_steps,
                decay_steps=max(config.steps, cosine.warmup_steps + 1),
                end_value=peak * cosine.final_fraction,
            )
        case _:
            return optax.constant_schedule(peak)


def optimizer_of(config: RunConfig, declared: Any) -> optax.GradientTransformation:
    """The update rule; `declared` is the model's table of parameters.

    Weight decay falls on matrices and tables, not on norms and biases. (What is drawn is a matrix: a
    bias may have two dimensions too, heads and their width.)
    """
    matrices = jax.tree.map(
        lambda p: p.initial == "fan_in", declared, is_leaf=lambda p: isinstance(p, Parameter)
    )
    rate = schedule_of(config)
    match config.optimizer:
        case AdamWOptimizer() as adamw:
            update = optax.adamw(
                rate,
                b1=adamw.beta1,
                b2=adamw.beta2,
                eps=adamw.epsilon,
                weight_decay=adamw.weight_decay,
                mask=matrices,
            )
        case AdaGradOptimizer() as adagrad:  # Optax too adds epsilon under the root
            update = optax.adagrad(rate, initial_accumulator_value=0.0, eps=adagrad.epsilon)
        case sgd:
            update = optax.sgd(rate, momentum=sgd.momentum or None)
    clip = config.optimizer.clip_norm
    return update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)
