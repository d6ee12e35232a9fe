"""Formats of the arithmetic by policy, and the loss scale that keeps float16 gradients from vanishing.

Gradients below 2^-24 are zero in float16. So the loss is multiplied by a power of two before it is
differentiated, and the gradients are divided by it in float32, where both are exact (Micikevicius et al.
2018, https://arxiv.org/abs/1710.03740). The scale finds itself: a step that is not finite halves it, and
`GOOD_STEPS` finite ones in a row double it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from ..models import Outcome
from ._gradients import Gradients, Loss

Tree = Any
FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.bfloat16}
"""In which a model computes; under fp8 its layers' products are narrower."""
FIRST_SCALE = 2.0**15
MOST_SCALE = 2.0**24  # a float32 loss times this is far from overflow
LEAST_SCALE = 1.0  # a step that is not finite even so is a bad step
GOOD_STEPS = 2000  # as in the paper's authors' libraries


def initial_scale(precision: str) -> Tree:
    """What the state keeps of the loss scale, {"loss_scale": {scale, good_steps}}; nothing but for fp16."""
    if precision != "fp16":
        return {}
    return {"loss_scale": {"scale": jnp.float32(FIRST_SCALE), "good_steps": jnp.int32(0)}}


def scaled_gradients(
    gradients: Gradients, loss: Loss, shardings: Tree, state: Tree, batch: Tree, key: Key[Array, ""]
) -> tuple[Array, Outcome, Tree]:
    """`gradients` at the state's parameters, taken of the scaled loss where the state has a scale.

    Loss and gradients come back unscaled, in float32.
    """
    before = (state["parameters"], state["model_state"])
    if "loss_scale" not in state:
        return gradients(loss, shardings, *before, batch, key)
    scale = state["loss_scale"]["scale"]

    def scaled(parameters: Tree, kept: Tree, microbatch: Tree, key: Key[Array, ""]) -> tuple[Array, Outcome]:
        value, outcome = loss(parameters, kept, microbatch, key)
        return value * scale, outcome

    value, outcome, gradient = gradients(scaled, shardings, *before, batch, key)
    return value / scale, outcome, jax.tree.map(lambda g: g / scale, gradient)


def next_scale(state: Tree, applied: Bool[Array, ""]) -> Tree:
    """What `initial_scale` made, after a step that was `applied` or not finite."""
    if "loss_scale" not in state:
        return {}
    scale, good = state["loss_scale"]["scale"], state["loss_scale"]["good_steps"] + 1
    grown = jnp.where(good >= GOOD_STEPS, jnp.minimum(scale * 2, MOST_SCALE), scale)
    return {
        "loss_scale": {
            "scale": jnp.where(applied, grown, jnp.maximum(scale / 2, LEAST_SCALE)),
            "good_steps": jnp.where(applied & (good < GOOD_STEPS), good, 0),
        }
    }


def scale_metrics(state: Tree) -> dict[str, Array]:
    """`loss_scale`, by which the step's loss was multiplied; nothing but for fp16."""
    return {"loss_scale": state["loss_scale"]["scale"]} if "loss_scale" in state else {}
