"""Train a two-layer network on a mesh of its own, until the loss is small."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH, ROWS = 512, 256

mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))
columns = NamedSharding(mesh, PartitionSpec(None, "model"))
rows_of_model = NamedSharding(mesh, PartitionSpec("model", None))
batch = NamedSharding(mesh, PartitionSpec("data"))

keys = jax.random.split(jax.random.key(int(sys.argv[1])), 2)
parameters = {
    "up": jax.device_put(jax.random.normal(keys[0], (WIDTH, 4 * WIDTH)) / WIDTH**0.5, columns),
    "down": jax.device_put(jax.random.normal(keys[1], (4 * WIDTH, WIDTH)) / WIDTH**0.5, rows_of_model),
}
momentum = jax.tree.map(jnp.zeros_like, parameters)


def loss(parameters, rows):
    hidden = jnp.tanh(rows @ parameters["up"])
    return jnp.mean((hidden @ parameters["down"] - rows) ** 2)


@jax.jit
def evaluate(parameters, rows):
    return loss(parameters, rows)


@jax.jit
def report(gradients):
    return jnp.sqrt(sum(jnp.sum(each**2) for each in jax.tree.leaves(gradients)))


def update(parameters, momentum, rows):
    value, gradients = jax.value_and_grad(loss)(parameters, rows)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    parameters = jax.tree.map(lambda p, m: p - 0.1 * m, parameters, momentum)
    return parameters, momentum, value


update = jax.jit(update, donate_argnums=(0, 1))

numbers = np.random.default_rng(0)
for step in range(1000):
    rows = jax.device_put(numbers.normal(size=(ROWS, WIDTH)).astype(np.float32), batch)
    if step % 100 == 0:
        print("before", evaluate(parameters, rows).item())
    parameters, momentum, value = update(parameters, momentum, rows)
    if value < 1e-4:
        break
    print(f"{step}: {value:.4f}")
