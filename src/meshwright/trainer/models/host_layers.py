"""Keep stacked layers in the hosts' memory, and fetch each where a pass uses it.

JAX gives an array in host memory no gradient on the device: in the transpose of a loop the two kinds of
memory do not add. So a loss is differentiated with respect to stand-ins on the device, whose numbers nothing
reads. XLA makes no array of them. `fetched` gives a layer's gradient to its stand-in.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Tree = Any
HELD = ("layers", "dense_layers")
"""The groups of parameters that are stacked layers."""


def in_space(parameters: Tree, space: Any) -> Tree:
    """Return parameters with those of `HELD` copied to the hosts' memory or to the devices."""
    held = {name: parameters[name] for name in HELD if name in parameters}
    return {**parameters, **jax.tree.map(lambda x: jax.device_put(x, space), held)}


def with_stand_ins(parameters: Tree) -> tuple[Tree, Tree]:
    """Return parameters with stand-ins in the place of stacked layers, and those layers in host memory."""
    parameters = in_space(parameters, jax.memory.Space.Host)
    held = {name: parameters[name] for name in HELD if name in parameters}
    return {**parameters, **jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), held)}, held


@jax.custom_vjp
def fetched(stand_in: Tree, held: Tree, place: Int[Array, ""]) -> Tree:
    """Return one layer of a stack in host memory, copied to the device, in the formats of its stand-in.

    Args:
        stand_in: of this layer; it gets the gradient.
        held: the stack, of the same structure [all layers, ...].
        place: the layer's index.
    """

    def one(stand_in: Array, stack: Array) -> Array:
        own = jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)
        return jax.device_put(own, jax.memory.Space.Device).astype(stand_in.dtype)

    return jax.tree.map(one, stand_in, held)


def _forward(stand_in: Tree, held: Tree, place: Array) -> tuple[Tree, None]:
    return fetched(stand_in, held, place), None


fetched.defvjp(_forward, lambda _, gradient: (gradient, None, None))
