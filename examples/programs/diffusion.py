"""A diffusion U-Net in Flax Linen: the noise is predicted, and an average of the parameters is kept.

Weigh it as it is: `meshwright weigh --on 8xH100 -- python examples/programs/diffusion.py`.

The loss is that of Ho et al. 2020 (arXiv 2006.11239), with their linear schedule of noise.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ROWS, SIDE, COLOURS, CHANNELS, NOISE_LEVELS, DECAY = 64, 32, 3, (64, 128), 1000, 0.999


class Residual(nn.Module):
    """Two convolutions of 3 x 3, with the time added between them; the input is added to their result."""

    channels: int

    @nn.compact
    def __call__(self, x, time):
        """Features [rows, side, side, channels]; time [rows, features]."""
        hidden = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        hidden = hidden + nn.Dense(self.channels)(time)[:, None, None]
        hidden = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(8)(hidden)))
        return hidden + (x if x.shape[-1] == self.channels else nn.Conv(self.channels, (1, 1))(x))


class UNet(nn.Module):
    """One level down, attention at the bottom, one level up."""

    @nn.compact
    def __call__(self, images, time):
        """The noise in images [rows, side, side, colours] at times [rows]."""
        narrow, wide = CHANNELS
        frequencies = 10_000.0 ** (-jnp.arange(narrow // 2) / (narrow // 2))
        angles = time[:, None] * frequencies[None]
        time = nn.silu(nn.Dense(wide)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)))
        top = Residual(narrow)(nn.Conv(narrow, (3, 3))(images), time)
        x = Residual(wide)(nn.Conv(wide, (3, 3), strides=2)(top), time)
        rows, side, _, _ = x.shape
        x = x + nn.SelfAttention(num_heads=4)(nn.GroupNorm(8)(x).reshape(rows, side**2, wide)).reshape(
            x.shape
        )
        x = nn.ConvTranspose(narrow, (2, 2), strides=(2, 2))(x)
        x = Residual(narrow)(jnp.concatenate([x, top], axis=-1), time)
        return nn.Conv(COLOURS, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


class TrainState(train_state.TrainState):
    """Flax's state, and the running average of the parameters."""

    average: Any


def initial_state(key) -> TrainState:
    """Return the state before the first step."""
    model = UNet()
    params = model.init(key, jnp.ones((1, SIDE, SIDE, COLOURS)), jnp.ones(1))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4))
    return TrainState.create(apply_fn=model.apply, params=params, average=params, tx=tx)


def train_step(state, images, key):
    """One step of Adam on the error in the noise, at one random time for each image."""
    of_time, of_noise = jax.random.split(jax.random.fold_in(key, state.step))
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, NOISE_LEVELS))
    time = jax.random.randint(of_time, images.shape[:1], 0, NOISE_LEVELS)
    noise = jax.random.normal(of_noise, images.shape)
    signal = kept[time][:, None, None, None]
    noisy = jnp.sqrt(signal) * images + jnp.sqrt(1 - signal) * noise

    def loss(params):
        predicted = state.apply_fn({"params": params}, noisy, time.astype(jnp.float32))
        return jnp.mean((predicted - noise) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    state = state.apply_gradients(grads=gradients)
    average = optax.incremental_update(state.params, state.average, 1 - DECAY)
    return state.replace(average=average), value


def main():
    """Train on random images, split over the devices; the state is on each of them."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    key = jax.device_put(jax.random.key(0), everywhere)
    state = jax.jit(initial_state, out_shardings=everywhere)(key)
    step = jax.jit(train_step, donate_argnums=0)
    numbers = np.random.default_rng(0)
    for number in range(100):
        images = numbers.normal(size=(ROWS, SIDE, SIDE, COLOURS)).astype(np.float32)
        state, value = step(state, jax.device_put(images, split), key)
        if number % 10 == 0:
            print(number, value)


if __name__ == "__main__":
    main()
