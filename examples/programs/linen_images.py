"""A Flax Linen image classifier: `TrainState` with batch statistics, dropout, parameters split (FSDP).

Weigh it as it is: `meshwright weigh --on 8xH100 -- python examples/programs/linen_images.py`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ROWS, SIDE, COLOURS, CHANNELS, CLASSES = 256, 32, 3, (64, 128), 10


class Classifier(nn.Module):
    """Two convolutions of 3 x 3, each with a BatchNorm; the mean of each channel; dropout; classes."""

    @nn.compact
    def __call__(self, images, *, train: bool):
        """Logits [rows, classes] of images [rows, side, side, colours]."""
        x = images
        for channels in CHANNELS:
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x.mean(axis=(1, 2)))
        return nn.Dense(CLASSES)(x)


class TrainState(train_state.TrainState):
    """Flax's state of parameters and optimizer, and the running statistics of the BatchNorms."""

    batch_stats: Any


def initial_state(key) -> TrainState:
    """Return the state before the first step."""
    model = Classifier()
    variables = model.init(key, jnp.ones((1, SIDE, SIDE, COLOURS)), train=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adamw(1e-3),
    )


def train_step(state, images, labels, key):
    """One step of AdamW."""

    def loss(params):
        logits, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            rngs={"dropout": jax.random.fold_in(key, state.step)},
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), changed["batch_stats"]

    (value, batch_stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=batch_stats), value


def main():
    """Train on random images."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))

    def split(leaf):  # the last dimension of every matrix and kernel that divides
        divides = leaf.ndim > 1 and leaf.shape[-1] % mesh.size == 0
        spec = PartitionSpec(*[None] * (leaf.ndim - 1), "fsdp") if divides else PartitionSpec()
        return NamedSharding(mesh, spec)

    key = jax.random.key(0)
    shardings = jax.tree.map(split, jax.eval_shape(initial_state, key))
    state = jax.jit(initial_state, out_shardings=shardings)(key)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    numbers = np.random.default_rng(0)
    for _ in range(100):
        images = jax.device_put(numbers.normal(size=(ROWS, SIDE, SIDE, COLOURS)).astype(np.float32), rows)
        labels = jax.device_put(numbers.integers(0, CLASSES, ROWS), rows)
        state, value = step(state, images, labels, key)
    print(value)


if __name__ == "__main__":
    main()
