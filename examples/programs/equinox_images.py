"""An Equinox image classifier: `filter_jit`, `filter_value_and_grad`, a BatchNorm with its state.

Weigh it as it is: `meshwright weigh examples/programs/equinox_images.py:program --on 1xH100`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

ROWS, SIDE, COLOURS, CHANNELS, CLASSES = 128, 32, 3, 64, 10
optimizer = optax.adamw(1e-3)


class Classifier(eqx.Module):
    """A strided convolution of 4 x 4, a BatchNorm, a convolution of 3 x 3, and classes."""

    first: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(COLOURS, CHANNELS, 4, stride=4, key=keys[0])
        self.norm = eqx.nn.BatchNorm(CHANNELS, axis_name="batch", mode="batch")
        self.second = eqx.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, key=keys[1])
        self.head = eqx.nn.Linear(CHANNELS, CLASSES, key=keys[2])

    def __call__(self, image, state):
        """Logits [classes] of one image [colours, side, side], and the statistics after it."""
        x, state = self.norm(self.first(image), state)
        x = jax.nn.relu(self.second(jax.nn.relu(x)))
        return self.head(x.mean(axis=(1, 2))), state


@eqx.filter_value_and_grad(has_aux=True)
def loss(model, state, images, labels):
    """Mean cross entropy, and the statistics of the batch."""
    of_each = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = of_each(images, state)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


@eqx.filter_jit(donate="all-except-first")
def train_step(batch, model, state, opt_state):
    """One step of AdamW."""
    (value, state), gradients = loss(model, state, *batch)
    updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, opt_state, value


def program():
    """Return the step and its arguments."""
    model, state = eqx.nn.make_with_state(Classifier)(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    images = jax.ShapeDtypeStruct((ROWS, COLOURS, SIDE, SIDE), jnp.float32)
    labels = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    return train_step, ((images, labels), model, state, opt_state)
