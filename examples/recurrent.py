"""An LSTM language model written in plain JAX: a `lax.scan` over time, gradients, one step of descent.

Weigh it as it is: `meshwright weigh examples.recurrent:train_step --on 8xH100`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH, LENGTH, VOCAB, EMBED, HIDDEN = 64, 32, 256, 128, 256


def init(key):
    """Embedding, the four gates' matrices side by side, and the output."""
    keys = jax.random.split(key, 4)
    return {
        "embedding": jax.random.normal(keys[0], (VOCAB, EMBED)),
        "from_input": jax.random.normal(keys[1], (EMBED, 4 * HIDDEN)) / EMBED**0.5,
        "from_hidden": jax.random.normal(keys[2], (HIDDEN, 4 * HIDDEN)) / HIDDEN**0.5,
        "bias": jnp.zeros((1, 4 * HIDDEN)),
        "output": jax.random.normal(keys[3], (HIDDEN, VOCAB)) / HIDDEN**0.5,
    }


def loss(params, tokens):
    """Mean cross entropy of each token from those before it; tokens [batch, length + 1]."""

    def cell(carry, x):
        hidden, memory = carry
        gates = x @ params["from_input"] + hidden @ params["from_hidden"] + params["bias"]
        keep, write, show, new = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(write) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(show) * jnp.tanh(memory)
        return (hidden, memory), hidden

    x = params["embedding"][tokens[:, :-1]].swapaxes(0, 1)  # time first, for the scan
    start = (jnp.zeros((tokens.shape[0], HIDDEN)), jnp.zeros((tokens.shape[0], HIDDEN)))
    _, hidden = jax.lax.scan(cell, start, x)
    log_probabilities = jax.nn.log_softmax(hidden @ params["output"])
    targets = tokens[:, 1:].swapaxes(0, 1)[..., None]
    return -jnp.mean(jnp.take_along_axis(log_probabilities, targets, axis=-1))


def train_step(mesh: Mesh):
    """The step and its arguments' shapes: parameters replicated, the batch split over the first axis."""

    def step(params, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = jax.eval_shape(init, jax.random.key(0))
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    return step, (params, jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32, sharding=split))
