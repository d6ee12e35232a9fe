"""Train a Flax NNX network: modules made eagerly, `nnx.jit`, metrics, a learning-rate schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

WIDTH, LAYERS, ROWS, CLASSES = 256, 3, 512, 16


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, rows):
        for block in self.blocks:
            rows = nnx.relu(block(rows))
        return self.head(self.dropout(self.norm(rows)))


def loss(model, rows, labels):
    logits = model(rows)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


@nnx.jit
def train_step(model, optimizer, metrics, rows, labels):
    (value, logits), gradients = nnx.value_and_grad(loss, has_aux=True)(model, rows, labels)
    metrics.update(loss=value, logits=logits, labels=labels)
    optimizer.update(model, gradients)


def main():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(optax.cosine_decay_schedule(1e-3, 100)), wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    everywhere = NamedSharding(mesh, PartitionSpec())
    nnx.update((model, optimizer), jax.device_put(state, everywhere))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    numbers = np.random.default_rng(0)
    split = NamedSharding(mesh, PartitionSpec("data"))
    for step in range(100):
        rows = jax.device_put(jnp.asarray(numbers.normal(size=(ROWS, WIDTH)), jnp.float32), split)
        labels = jax.device_put(numbers.integers(0, CLASSES, ROWS), split)
        train_step(model, optimizer, metrics, rows, labels)
        if step % 10 == 0:
            scores = metrics.compute()
            print(step, float(scores["loss"]), scores["accuracy"])
            metrics.reset()


if __name__ == "__main__":
    main()
