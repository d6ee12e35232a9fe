"""A residual MLP whose blocks are computed again in the backward pass, trained by Optax; donated state.

Weigh it as it is: `meshwright weigh examples.rematerialised:train_step --on 8xH100`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH, WIDTH, HIDDEN, BLOCKS = 256, 128, 512, 4


def train_step(mesh: Mesh):
    """The step and its arguments' shapes: state split over the first axis by rows, and so is the batch."""
    optimizer = optax.adamw(1e-3)

    @jax.checkpoint
    def block(params, x):
        return x + jnp.tanh(x @ params["up"]) @ params["down"]

    def loss(params, inputs, targets):
        x = inputs
        for layer in params:
            x = block(layer, x)
        return jnp.mean(jnp.square(x - targets))

    @partial(jax.jit, donate_argnames=("params", "moments"))
    def step(params, moments, *, inputs, targets):
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    rows = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=split)
    params = [
        {
            "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32, sharding=split),
            "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32, sharding=split),
        }
        for _ in range(BLOCKS)
    ]
    moments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split if leaf.ndim else None),
        jax.eval_shape(optimizer.init, params),
    )
    return step, (params, moments), {"inputs": rows, "targets": rows}
