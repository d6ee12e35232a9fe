"""A linear model with one output: prediction = inputs . weight (+ bias); mean squared error."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..config import LinearModel
from ._base import STATELESS, Batch, Context, Outcome, Parameter, Tree


class Linear:
    """See the module."""

    def __init__(self, config: LinearModel) -> None:
        self.config = config

    def parameters(self) -> Tree:
        """`weight` [input_dim] and, where asked for, `bias` []."""
        width = self.config.input_dim
        declared = {"weight": Parameter(shape=(width, 1), dims=("embed", "one"), fan_in=width)}
        if self.config.bias:
            declared["bias"] = Parameter(shape=(1,), dims=("one",), initial="zeros")
        return declared

    def state(self) -> Tree:
        """Nothing."""
        return {}

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Mean squared error over the rows; batch: inputs [rows, input_dim], targets [rows]."""
        weight = context.gather(parameters["weight"], "embed", "one")
        prediction = (batch["inputs"].astype(context.dtype) @ weight)[:, 0].astype(jnp.float32)
        if self.config.bias:
            prediction = prediction + parameters["bias"]
        prediction = context.pin(prediction, "batch")
        return jnp.mean(jnp.square(prediction - batch["targets"])), STATELESS
