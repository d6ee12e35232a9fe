"""A Keras 3 model on JAX: a train step of `stateless_call` and `stateless_apply`, as in Keras' guide.

Weigh it as it is: `meshwright weigh --on 1xH100 -- python examples/programs/keras_stateless.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it when it is imported

import jax
import keras
import numpy as np

ROWS, SIDE, CHANNELS, CLASSES = 256, 28, (32, 64), 10

model = keras.Sequential(
    [
        keras.Input((SIDE, SIDE, 1)),
        keras.layers.Conv2D(CHANNELS[0], 3, strides=2, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Conv2D(CHANNELS[1], 3, padding="same"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(CLASSES),
    ]
)
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loss(trainable_variables, non_trainable_variables, images, labels):
    """Mean cross entropy, and the variables that the forward pass changes."""
    logits, non_trainable_variables = model.stateless_call(
        trainable_variables, non_trainable_variables, images, training=True
    )
    return loss_of(labels, logits), non_trainable_variables


@jax.jit
def train_step(trainable_variables, non_trainable_variables, optimizer_variables, images, labels):
    """One step of Adam."""
    gradient = jax.value_and_grad(loss, has_aux=True)
    (value, non_trainable_variables), gradients = gradient(
        trainable_variables, non_trainable_variables, images, labels
    )
    trainable_variables, optimizer_variables = optimizer.stateless_apply(
        optimizer_variables, gradients, trainable_variables
    )
    return value, trainable_variables, non_trainable_variables, optimizer_variables


def main():
    """Train on random images."""
    trainable = [variable.value for variable in model.trainable_variables]
    non_trainable = [variable.value for variable in model.non_trainable_variables]
    moments = [variable.value for variable in optimizer.variables]
    numbers = np.random.default_rng(0)
    for _ in range(100):
        images = numbers.normal(size=(ROWS, SIDE, SIDE, 1)).astype("float32")
        labels = numbers.integers(0, CLASSES, ROWS)
        value, trainable, non_trainable, moments = train_step(
            trainable, non_trainable, moments, images, labels
        )
    print(value)


if __name__ == "__main__":
    main()
