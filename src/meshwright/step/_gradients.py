"""Loss and gradients of a whole batch, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ..models import Outcome

Tree = Any
Loss = Callable[[Tree, Tree, Tree, Key[Array, ""]], tuple[Array, Outcome]]
"""Parameters, model state, microbatch and key to the mean loss and what else came of it."""


def gradients_of(
    loss: Loss, shardings: Tree, parameters: Tree, state: Tree, batch: Tree, key: Key[Array, ""]
) -> tuple[Array, Outcome, Tree]:
    """Mean loss, outcome (state after the last microbatch, mean metrics) and mean gradient of a batch.

    Gradients are summed over the microbatches in the parameters' format, laid as `shardings` say.
    """
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    grad = jax.value_and_grad(loss, has_aux=True)
    if num_microbatches == 1:
        first = jax.tree.map(lambda x: x[0], batch)
        (value, outcome), gradient = grad(parameters, state, first, jax.random.fold_in(key, 0))
        return value, outcome, gradient

    def add(carry: tuple[Tree, Tree, Array], item: tuple[Tree, Array]) -> tuple[Any, dict[str, Array]]:
        (state, total, value), (microbatch, index) = carry, item
        (more, outcome), gradient = grad(parameters, state, microbatch, jax.random.fold_in(key, index))
        total = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, total, gradient), shardings)
        return (outcome.state, total, value + more), outcome.metrics

    zeros = jax.tree.map(jnp.zeros_like, parameters)
    with jax.named_scope("microbatches"):
        (state, total, value), metrics = jax.lax.scan(
            add, (state, zeros, jnp.float32(0)), (batch, jnp.arange(num_microbatches))
        )
    outcome = Outcome(state, jax.tree.map(jnp.mean, metrics))
    return value / num_microbatches, outcome, jax.tree.map(lambda g: g / num_microbatches, total)
