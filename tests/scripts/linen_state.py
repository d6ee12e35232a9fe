"""Train a Flax Linen network with a `TrainState` whose parameters are split over the devices (FSDP)."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
arguments = parser.parse_args()

WIDTH, LAYERS, ROWS = arguments.width, 4, 1024
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


class Network(nn.Module):
    @nn.compact
    def __call__(self, rows):
        for _ in range(LAYERS):
            rows = nn.gelu(nn.Dense(WIDTH, use_bias=False)(rows))
        return nn.Dense(1)(rows)


def made(key):
    network = Network()
    parameters = network.init(key, jnp.ones((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=network.apply, params=parameters, tx=optax.adamw(1e-3))


def split(leaf):
    first = leaf.ndim and leaf.shape[0] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec("fsdp") if first else PartitionSpec())


key = jax.random.PRNGKey(0)
shardings = jax.tree.map(split, jax.eval_shape(made, key))
state = jax.jit(made, out_shardings=shardings)(key)
print(sum(leaf.size for leaf in jax.tree.leaves(state.params)), "parameters")


def train_step(state, rows):
    def loss(parameters):
        return jnp.mean(state.apply_fn({"params": parameters}, rows) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), {"loss": value, "norm": optax.global_norm(gradients)}


batch = NamedSharding(mesh, PartitionSpec("fsdp"))
train_step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
for _ in range(20):
    key, fresh = jax.random.split(key)
    rows = jax.device_put(jax.random.normal(fresh, (ROWS, WIDTH)), batch)
    state, metrics = train_step(state, rows)
    if int(state.step) % 5 == 0:
        print(jax.device_get(metrics))
