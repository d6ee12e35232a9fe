"""Keep stacked layers in the hosts' memory, and fetch each where a pass uses it.

JAX gives an array in host memory no gradient on the device: in the transpose of a loop the two kinds of
memory do not add. So a loss is differentiated with respect to stand-ins on the device, whose numbers nothing
reads. XLA makes no array of them. `fetched` gives a layer's gradient to its stand-in.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.trainer.step import stacked_layers

Tree = Any


def in_space(parameters: Tree, space: Any) -> Tree:
    """Return parameters with stacked layers copied to the hosts' memory or to the devices."""
    return {**parameters, **jax.tree.map(lambda x: jax.device_put(x, space), stacked_layers(parameters))}


def with_stand_ins(parameters: Tree) -> tuple[Tree, Tree]:
    """Return parameters with stand-ins in the place of stacked layers, and those layers in host memory."""
    parameters = in_space(parameters, jax.memory.Space.Host)
    held = stacked_layers(parameters)
    return {**parameters, **jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), held)}, held


@jax.custom_vjp
def fetched(stand_in: Tree, held: Tree, places: Tree) -> Tree:
    """Return one layer of a stack in host memory, copied to the device, in the formats of its stand-in.

    Args:
        stand_in: of this layer; it gets the gradient.
        held: the stack, of the same structure [all layers, ...].
        places: the layer's index, by the block's part.
    """

    def one(place: Array, stand_in: Array, stack: Array) -> Array:
        own = jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)
        return jax.device_put(own, jax.memory.Space.Device).astype(stand_in.dtype)

    return {part: jax.tree.map(partial(one, places[part]), stand_in[part], held[part]) for part in stand_in}


def _forward(stand_in: Tree, held: Tree, places: Tree) -> tuple[Tree, None]:
    return fetched(stand_in, held, places), None


fetched.defvjp(_forward, lambda _, gradient: (gradient, None, None))
