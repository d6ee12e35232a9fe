"""A convolutional classifier in Flax, with Optax: a strided and a padded convolution, one dense layer.

Weigh it as it is: `meshwright weigh examples.convolutional:train_step --on 8xH100`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH, SIDE, CLASSES = 64, 28, 10
CHANNELS = (1, 32, 64)


class Classifier(nn.Module):
    """28 x 28 to 14 x 14 to 14 x 14, then the mean of each channel, then classes."""

    @nn.compact
    def __call__(self, images):
        """Logits [batch, classes] of images [batch, side, side, 1]."""
        x = nn.relu(nn.Conv(CHANNELS[1], (3, 3), strides=2, padding="SAME")(images))
        x = nn.relu(nn.Conv(CHANNELS[2], (5, 5), padding=2)(x))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


@jax.jit
def step(state: TrainState, images, labels):
    """One step of gradient descent with momentum."""

    def loss(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def train_step(mesh: Mesh):
    """The step and its arguments' shapes: the state replicated, the batch split over the first axis."""
    model = Classifier()

    def init(key):
        params = model.init(key, jnp.zeros((1, SIDE, SIDE, CHANNELS[0])))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    images = jax.ShapeDtypeStruct((BATCH, SIDE, SIDE, CHANNELS[0]), jnp.float32, sharding=split)
    labels = jax.ShapeDtypeStruct((BATCH,), jnp.int32, sharding=split)
    return step, (jax.eval_shape(init, jax.random.key(0)), images, labels)
