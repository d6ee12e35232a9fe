"""A Haiku network of residual blocks: `hk.transform_with_state`, BatchNorm, dropout, a mesh.

Weigh it as it is: `meshwright weigh examples/programs/haiku_residual.py:program --on 8xH100 --layout data=8`.
"""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

ROWS, INPUTS, WIDTH, BLOCKS, CLASSES = 512, 64, 256, 3, 16


def forward(rows, is_training):
    """Logits [rows, classes] of rows [rows, inputs]."""
    x = hk.Linear(WIDTH)(rows)
    for _ in range(BLOCKS):
        norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.99)
        hidden = jax.nn.relu(hk.Linear(WIDTH, with_bias=False)(norm(x, is_training)))
        x = x + hk.Linear(WIDTH)(hk.dropout(hk.next_rng_key(), 0.1, hidden))
    return hk.Linear(CLASSES)(x)


network = hk.transform_with_state(forward)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


class TrainingState(NamedTuple):
    """What a step changes."""

    params: hk.Params
    model_state: hk.State
    opt_state: optax.OptState
    rng: jax.Array


def initial_state(key) -> TrainingState:
    """Return the state before the first step."""
    params, model_state = network.init(key, jnp.ones((2, INPUTS)), True)
    return TrainingState(params, model_state, optimizer.init(params), key)


def train_step(state: TrainingState, rows, labels):
    """One step of Adam."""
    rng, for_dropout = jax.random.split(state.rng)

    def loss(params):
        logits, model_state = network.apply(params, state.model_state, for_dropout, rows, True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), model_state

    (value, model_state), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(gradients, state.opt_state)
    return TrainingState(optax.apply_updates(state.params, updates), model_state, opt_state, rng), value


def program(mesh):
    """Return the step and its arguments: the state on every device, the rows split over the first axis."""
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    rows = jax.ShapeDtypeStruct((ROWS, INPUTS), jnp.float32, sharding=split)
    labels = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=split)
    state = jax.eval_shape(initial_state, jax.random.PRNGKey(0))
    return jax.jit(train_step, donate_argnums=0), (state, rows, labels)
