"""Update what a step changes, parameters and moments, in the formats in which a run keeps them.

What waits in the hosts' memory is updated by a room outside the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key

from meshwright.config import RunConfig, holds_layers
from meshwright.registry import room

from . import _state_formats as _formats

Tree = Any
ON_HOST = ("optimizer", "master")  # what `offload = "optimizer"` keeps there


class Change(NamedTuple):
    """Hold what a step has found: the gradient, where experts have too many tokens, the new model state."""

    gradient: Tree
    excess: Tree
    model_state: Tree


class Scalars(NamedTuple):
    """Hold an update's learning rate, whether it is applied, and a key if it rounds by chance."""

    rate: Array
    applied: Array
    key: Key[Array, ""] | None


@dataclass(frozen=True)
class Update:
    """The update of a run's state. `declared`: its trained parameters, which `mesh` holds."""

    config: RunConfig
    declared: Tree
    mesh: Mesh
    optimizer: optax.GradientTransformation
    formats: _formats.MomentFormats

    def __call__(self, old: Tree, change: Change, scalars: Scalars, norm: Array) -> tuple[Tree, Array]:
        """Return the new state in place of `old`, and `norm`, for which the copies wait."""
        if not any(name in old for name in on_host(self.config)):
            return self.whole(old, change, scalars), norm
        return room("offload").updated(self, old, change, scalars, norm)

    def whole(self, old: Tree, change: Change, scalars: Scalars) -> Tree:
        """Return the new state from one that is on the devices."""
        state, bias_rate = self.config.state, getattr(self.config.model, "router_bias_rate", 0.0)
        wide = _formats.widened(_formats.with_master(old["parameters"], old.get("master")))
        updates, moments = self.optimizer.update(
            change.gradient, self.formats.widened(old["optimizer"]), wide
        )
        updates = jax.tree.map(lambda u: scalars.rate * u, updates)
        parameters = optax.apply_updates(wide, updates)
        if bias_rate:
            parameters = room("experts").with_moved_bias(parameters, wide, change.excess, bias_rate)
        if state.moments == "8bit":
            moments = self.formats.narrowed(moments)
        new: Tree = {"parameters": parameters, "optimizer": moments, "model_state": change.model_state}
        if "master" in old:
            new |= _formats.split_master(old["parameters"], parameters)
        if scalars.key is not None:
            new = _formats.rounded_as(old, new, state, jax.random.fold_in(scalars.key, _formats.OF_ROUNDING))
        return jax.tree.map(lambda new, old: jnp.where(scalars.applied, new, old), new, old)


def on_host(config: RunConfig) -> tuple[str, ...]:
    """Return the parts of the state that wait in host memory; of parameters, only stacked layers."""
    return (*(ON_HOST * config.waits("moments")), *(("parameters",) * config.waits("parameters")))


def stacked_layers(parameters: Tree) -> Tree:
    """Return the groups of parameters that are stacked layers."""
    return {name: group for name, group in parameters.items() if holds_layers(name)}
