"""Batch normalisation: each channel to mean 0 and variance 1 over the rows and places of a batch.

In training the statistics are the batch's, and running ones are kept for evaluation, as PyTorch keeps them
(https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html): nine tenths of the old and one
tenth of the new, whose variance is divided by the count less one. Rows of weight zero do not count.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from ._base import Context, Parameter, Tree

KEPT = 0.9  # of a running statistic, each step
EPSILON = 1e-5

Statistics = Literal["global", "replica"]


def norm_parameters(channels: int) -> Tree:
    """`scale` and `bias` of a layer."""
    return {
        "scale": Parameter(shape=(channels,), dims=("channels_out",), initial="ones"),
        "bias": Parameter(shape=(channels,), dims=("channels_out",), initial="zeros"),
    }


def norm_state(channels: int) -> Tree:
    """Running `mean` and `variance` of a layer."""
    return {
        "mean": Parameter(shape=(channels,), dims=("channels_out",), initial="zeros"),
        "variance": Parameter(shape=(channels,), dims=("channels_out",), initial="ones"),
    }


def batch_norm(
    x: Float[Array, "rows channels height width"],
    parameters: Tree,
    state: Tree,
    context: Context,
    statistics: Statistics,
    weights: Float[Array, " rows"] | None = None,
) -> tuple[Float[Array, "rows channels height width"], Tree]:
    """`x` normalised, in its format, and the layer's new state; statistics are float32.

    Args:
        statistics: in training over all rows ("global", a small all-reduce in each direction), or over each
            replica's own ("replica"), whose means then go into the running statistics.
        weights: rows whose weight is zero are left out of the statistics.
    """
    scale, bias = (context.gather(parameters[name], "channels_out") for name in ("scale", "bias"))
    if not context.training:
        shift = (1, -1, 1, 1)
        mean, variance = state["mean"].reshape(shift), state["variance"].reshape(shift)
        return _scaled(x, mean, variance, scale, bias), state
    num_groups = _num_replicas(context) if statistics == "replica" else 1
    y = rearrange(
        x, "(groups rows) channels height width -> groups rows channels height width", groups=num_groups
    )
    if num_groups > 1:
        y = context.pin(y, "batch", "replica_rows", "channels", "height", "width")
    counted = jnp.ones(y.shape[:2], jnp.float32)
    if weights is not None:
        counted = (weights > 0).astype(jnp.float32).reshape(y.shape[:2])
    mean, variance, count = _statistics(y, counted)
    y = _scaled(y, mean, variance, scale, bias)
    x = context.pin(y.reshape(x.shape), "batch", "channels", "height", "width")
    return x, _moved(state, mean, variance, count)


def _num_replicas(context: Context) -> int:
    return math.prod(context.mesh.shape.get(axis, 1) for axis in ("data", "fsdp"))


def _statistics(
    x: Float[Array, "groups rows channels height width"], counted: Float[Array, "groups rows"]
) -> tuple[Array, Array, Array]:
    """Mean and variance [groups, 1, channels, 1, 1], and of how many numbers they are [groups]."""
    x = x.astype(jnp.float32)
    count = jnp.sum(counted, axis=1) * (x.shape[3] * x.shape[4])
    least = jnp.maximum(count, 1.0)[:, None, None, None, None]
    shares = counted[:, :, None, None, None]
    mean = jnp.sum(x * shares, axis=(1, 3, 4), keepdims=True) / least
    variance = jnp.sum(jnp.square(x - mean) * shares, axis=(1, 3, 4), keepdims=True) / least
    return mean, variance, count


def _scaled(x: Array, mean: Array, variance: Array, scale: Array, bias: Array) -> Array:
    whole = (*[1] * (x.ndim - 3), -1, 1, 1)  # channels, height, width
    scale, bias = (array.astype(jnp.float32).reshape(whole) for array in (scale, bias))
    y = (x.astype(jnp.float32) - mean) * jax.lax.rsqrt(variance + EPSILON)
    return (y * scale + bias).astype(x.dtype)


def _moved(state: Tree, mean: Array, variance: Array, count: Array) -> Tree:
    """The running statistics after a batch; groups without a row do not count."""
    filled = (count > 0).astype(jnp.float32)
    num_filled = jnp.sum(filled)
    unbiased = count / jnp.maximum(count - 1, 1.0)

    def one(old: Array, new: Array) -> Array:
        found = jnp.sum(filled[:, None] * new, axis=0) / jnp.maximum(num_filled, 1.0)
        return jnp.where(num_filled > 0, KEPT * old + (1 - KEPT) * found, old)

    moved = {
        "mean": one(state["mean"], mean[:, 0, :, 0, 0]),
        "variance": one(state["variance"], variance[:, 0, :, 0, 0] * unbiased[:, None]),
    }
    return jax.lax.stop_gradient(moved)
