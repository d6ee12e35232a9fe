"""Define the linear model and the deep linear model, the smallest programs to weigh.

Both have one output and a mean squared error. `Linear` predicts inputs . weight (+ bias). `Cruncher` has
`num_layers` square matrices and a head, without biases.

FLOPs of `Cruncher` for batch B, width D and P parameters: forward 2BP; backward 4BP - 2BD^2. The term 2BD^2
is the gradient of the inputs, which is not computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..config import CruncherModel, LinearModel
from ._base import STATELESS, Batch, Context, Outcome, Parameter, Tree


class Linear:
    """The linear model with one output."""

    def __init__(self, config: LinearModel) -> None:
        self.config = config

    def parameters(self) -> Tree:
        """Declare `weight` [input_dim, 1] and, if the config asks for it, `bias` [1]."""
        width = self.config.input_dim
        declared = {"weight": Parameter(shape=(width, 1), dims=("embed", "one"), fan_in=width)}
        if self.config.bias:
            declared["bias"] = Parameter(shape=(1,), dims=("one",), initial="zeros")
        return declared

    def state(self) -> Tree:
        """Return an empty tree: the model has no state."""
        return {}

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean squared error over the rows; batch: inputs [rows, input_dim], targets [rows]."""
        weight = context.gather(parameters["weight"], "embed", "one")
        prediction = (batch["inputs"].astype(context.dtype) @ weight)[:, 0].astype(jnp.float32)
        if self.config.bias:
            prediction = prediction + parameters["bias"]
        prediction = context.pin(prediction, "batch")
        return jnp.mean(jnp.square(prediction - batch["targets"])), STATELESS


class Cruncher:
    """The deep linear model: square matrices and a head with one output."""

    def __init__(self, config: CruncherModel) -> None:
        self.config = config

    def parameters(self) -> Tree:
        """Declare `layers`, a list of [width, width] matrices, and `head` [width, 1]."""
        width = self.config.width
        layer = Parameter(shape=(width, width), dims=("embed", "mlp"), fan_in=width)
        return {
            "layers": [layer] * self.config.num_layers,
            "head": Parameter(shape=(width, 1), dims=("embed", "one"), fan_in=width),
        }

    def state(self) -> Tree:
        """Return an empty tree: the model has no state."""
        return {}

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean squared error over the rows; batch: inputs [rows, width], targets [rows]."""
        x = batch["inputs"].astype(context.dtype)
        for index, layer in enumerate(parameters["layers"]):
            with jax.named_scope(f"layer{index}"):
                x = context.pin(x @ context.gather(layer, "embed", "mlp"), "batch", "mlp")
                x = context.pin(x, "batch", "embed")
        with jax.named_scope("head"):
            prediction = context.pin(x @ context.gather(parameters["head"], "embed", "one"), "batch", "embed")
        return jnp.mean(jnp.square(prediction[:, 0].astype(jnp.float32) - batch["targets"])), STATELESS
