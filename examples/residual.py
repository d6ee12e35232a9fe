"""A residual convolutional network in plain JAX: a stem, three stages of two blocks, one dense layer.

Weigh it as it is: `meshwright weigh examples.residual:train_step --on 8xH100`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH, SIDE, CLASSES = 128, 32, 10
STAGES = (16, 32, 64)  # channels; each stage but the first halves the image
BLOCKS = 2  # of each stage
RATE = 0.1


def shapes():
    """Every kernel [out, in, height, width] and the dense layer, by name."""
    found = {"stem": (STAGES[0], 3, 3, 3), "head": (STAGES[-1], CLASSES)}
    channels = STAGES[0]
    for stage, width in enumerate(STAGES):
        for block in range(BLOCKS):
            name = f"stage{stage}/block{block}"
            found[f"{name}/first"] = (width, channels, 3, 3)
            found[f"{name}/second"] = (width, width, 3, 3)
            if channels != width:
                found[f"{name}/shortcut"] = (width, channels, 1, 1)
            channels = width
    return found


def convolve(x, kernel, stride):
    """Padded so that a stride of one keeps the size; `x` is [batch, channels, height, width]."""
    pad = kernel.shape[-1] // 2
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad), (pad, pad)])


def normalise(x):
    """Each channel to mean 0 and variance 1 over the batch and the image."""
    mean = x.mean((0, 2, 3), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean((0, 2, 3), keepdims=True) + 1e-5)


def logits_of(params, images):
    """Logits [batch, classes] of images [batch, 3, side, side]."""
    x = jax.nn.relu(normalise(convolve(images, params["stem"], 1)))
    for stage in range(len(STAGES)):
        for block in range(BLOCKS):
            name = f"stage{stage}/block{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            with jax.named_scope(f"stage{stage}"):
                y = jax.nn.relu(normalise(convolve(x, params[f"{name}/first"], stride)))
                y = normalise(convolve(y, params[f"{name}/second"], 1))
                if f"{name}/shortcut" in params:
                    x = normalise(convolve(x, params[f"{name}/shortcut"], stride))
                x = jax.nn.relu(x + y)
    with jax.named_scope("head"):
        return x.mean((2, 3)) @ params["head"]


@partial(jax.jit, donate_argnames="params")
def step(params, images, labels):
    """One step of gradient descent on the mean cross entropy."""

    def loss(params):
        logits = logits_of(params, images)
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), value


def train_step(mesh: Mesh):
    """The step and its arguments' shapes: parameters replicated, the batch split over the first axis."""
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes().items()}
    images = jax.ShapeDtypeStruct((BATCH, 3, SIDE, SIDE), jnp.float32, sharding=split)
    labels = jax.ShapeDtypeStruct((BATCH,), jnp.int32, sharding=split)
    return step, (params, images, labels)
