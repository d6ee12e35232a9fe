"""Train an Equinox network: `filter_jit` with donation, parameters split by `filter_shard`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

WIDTH, ROWS = 256, 512
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere = NamedSharding(mesh, PartitionSpec())
split = NamedSharding(mesh, PartitionSpec("data"))

network = eqx.nn.MLP(WIDTH, 8, WIDTH, depth=2, key=jax.random.key(0))
optimizer = optax.adam(1e-3)
state = optimizer.init(eqx.filter(network, eqx.is_inexact_array))
network, state = eqx.filter_shard((network, state), everywhere)


@eqx.filter_value_and_grad
def loss(network, rows, labels):
    scores = jax.vmap(network)(rows)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1))


@eqx.filter_jit(donate="all")
def make_step(network, state, rows, labels):
    value, gradients = loss(network, rows, labels)
    updates, state = optimizer.update(gradients, state, eqx.filter(network, eqx.is_inexact_array))
    return eqx.apply_updates(network, updates), state, value


numbers = np.random.default_rng(0)
total = 0.0
for _ in range(50):
    rows, labels = eqx.filter_shard(
        (
            jnp.asarray(numbers.normal(size=(ROWS, WIDTH)), jnp.float32),
            jnp.asarray(numbers.integers(0, 8, ROWS)),
        ),
        split,
    )
    network, state, value = make_step(network, state, rows, labels)
    total += value.item()
print(total / 50)
