"""Define the image classifiers LeNet and ResNet-18, with batch normalisation and their loss.

Layouts are PyTorch's: images [rows, channels, height, width], kernels [out, in, height, width]. Matrices are
[in, out].

LeNet: two convolutions and two matrices, for images of 28 x 28 pixels and ten classes. Its forward FLOPs for
N images, two per multiply-add, are
    2 N (20 26 26 (1 3 3) + 50 9 9 (20 5 5)) for convolutions, 2 N (800 128 + 128 10) for matrices.
Backward FLOPs are twice that, less the first convolution's once: the images' gradient is not computed.

ResNet-18 for square images of one channel and ten classes (He et al. 2015, https://arxiv.org/abs/1512.03385):
- The stem is a 7 x 7 convolution to 64 channels with stride 2, norm, ReLU, then 3 x 3 max pooling, stride 2.
- Four stages have two blocks each, of 64, 128, 256 and 512 channels. The first block of each stage except the
  first halves the image.
- A block is 3 x 3, norm, ReLU, 3 x 3, norm, then the sum with its input, then ReLU. If the shape changes, the
  input passes through a 1 x 1 convolution with the block's stride, without a norm.
- The mean over the image follows, and a matrix to the logits.
No convolution has a bias. A norm would subtract it again, and a bias of the 1 x 1 convolution would only add
to the bias of the block's last norm. Hand-computed FLOPs are in tests/test_oracle_flops.py.

Batch normalisation: each channel has mean 0 and variance 1 over the rows and positions of a batch. Training
uses the batch's statistics and updates running statistics for evaluation, as PyTorch does
(https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html): 0.9 of the old plus 0.1 of the
new, whose variance is divided by count - 1. Rows of weight zero do not count.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange, reduce
from jaxtyping import Array, Float

from ..config import ResNetModel
from ._base import Batch, Context, Outcome, Parameter, Tree


def judged(
    logits: Float[Array, "rows classes"], batch: Batch
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the mean cross entropy in nats, and `accuracy`: the share of rows whose largest logit is right.

    `batch` has `labels` [rows] and optionally `weights` [rows], by which each row's values are multiplied.
    Both results are means over all rows, in float32.
    """
    logits, labels = logits.astype(jnp.float32), batch["labels"]
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=1) - chosen
    right = (jnp.argmax(logits, axis=1) == labels).astype(jnp.float32)
    if "weights" in batch:
        losses, right = losses * batch["weights"], right * batch["weights"]
    return jnp.mean(losses), {"accuracy": jnp.mean(right)}


KEPT = 0.9  # share of a running statistic that each step keeps
EPSILON = 1e-5

Statistics = Literal["global", "replica"]


def norm_parameters(channels: int) -> Tree:
    """Declare `scale` and `bias` of a layer."""
    return {
        "scale": Parameter(shape=(channels,), dims=("channels_out",), initial="ones"),
        "bias": Parameter(shape=(channels,), dims=("channels_out",), initial="zeros"),
    }


def norm_state(channels: int) -> Tree:
    """Declare the running `mean` and `variance` of a layer."""
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
    """Normalise `x`, keeping its format; return it with the layer's new state. Statistics are float32.

    Args:
        statistics: the rows of the statistics in training. "global": all rows, at the cost of a small
            all-reduce in each direction. "replica": each replica's own rows; the running statistics then
            take the mean over the replicas.
        weights: rows of weight zero are left out of the statistics.
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
    """Return mean and variance [groups, 1, channels, 1, 1], and counts of numbers per channel [groups]."""
    x = x.astype(jnp.float32)
    count = jnp.sum(counted, axis=1) * (x.shape[3] * x.shape[4])
    least = jnp.maximum(count, 1.0)[:, None, None, None, None]
    shares = counted[:, :, None, None, None]
    mean = jnp.sum(x * shares, axis=(1, 3, 4), keepdims=True) / least
    variance = jnp.sum(jnp.square(x - mean) * shares, axis=(1, 3, 4), keepdims=True) / least
    return mean, variance, count


def _scaled(x: Array, mean: Array, variance: Array, scale: Array, bias: Array) -> Array:
    whole = (*[1] * (x.ndim - 3), -1, 1, 1)  # the last dims are channels, height, width
    scale, bias = (array.astype(jnp.float32).reshape(whole) for array in (scale, bias))
    y = (x.astype(jnp.float32) - mean) * jax.lax.rsqrt(variance + EPSILON)
    return (y * scale + bias).astype(x.dtype)


def _moved(state: Tree, mean: Array, variance: Array, count: Array) -> Tree:
    """Return the running statistics after a batch; groups without a counted row do not contribute."""
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


KERNEL = ("channels_out", "channels_in", "height", "width")


class LeNet:
    """LeNet for images of 28 x 28 pixels and ten classes."""

    def parameters(self) -> Tree:
        """Declare `convolution1`, `convolution2`, `hidden` and `head`, each with `weight` and `bias`."""
        return {
            "convolution1": {
                "weight": Parameter(shape=(20, 1, 3, 3), dims=KERNEL, fan_in=9),
                "bias": Parameter(shape=(20,), dims=("channels_out",), initial="zeros"),
            },
            "convolution2": {
                "weight": Parameter(shape=(50, 20, 5, 5), dims=KERNEL, fan_in=500),
                "bias": Parameter(shape=(50,), dims=("channels_out",), initial="zeros"),
            },
            "hidden": {
                "weight": Parameter(shape=(800, 128), dims=("embed", "mlp"), fan_in=800),
                "bias": Parameter(shape=(128,), dims=("mlp",), initial="zeros"),
            },
            "head": {
                "weight": Parameter(shape=(128, 10), dims=("mlp", "one"), fan_in=128),
                "bias": Parameter(shape=(10,), dims=("one",), initial="zeros"),
            },
        }

    def state(self) -> Tree:
        """Return an empty tree: the model has no state."""
        return {}

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean cross entropy in nats, and an outcome with `accuracy`.

        Args:
            batch: `images` [rows, 1, 28, 28], `labels` [rows] below 10, and optionally `weights` [rows].
        """
        x = batch["images"].astype(context.dtype)
        for name in ("convolution1", "convolution2"):
            with jax.named_scope(name):
                x = _lenet_convolution(x, parameters[name], context)
        x = rearrange(x, "rows channels height width -> rows (channels height width)")
        with jax.named_scope("hidden"):
            x = jax.nn.relu(_mapped(x, parameters["hidden"], context, ("embed", "mlp"), "mlp"))
        with jax.named_scope("head"):
            logits = _mapped(x, parameters["head"], context, ("mlp", "one"), "embed")
        loss, metrics = judged(logits, batch)
        return loss, Outcome({}, metrics)


def _lenet_convolution(
    x: Float[Array, "rows channels height width"], parameters: Tree, context: Context
) -> Float[Array, "rows channels_out half_height half_width"]:
    """Apply an unpadded convolution, bias, ReLU and 2 x 2 mean pooling; drop an odd last row or column."""
    kernel = context.gather(parameters["weight"], *KERNEL)
    x = jax.lax.conv(x, kernel, window_strides=(1, 1), padding="VALID")
    x = context.pin(x, "batch", "channels", "height", "width")
    x = jax.nn.relu(x + context.gather(parameters["bias"], "channels_out")[None, :, None, None])
    even = x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    return reduce(even, "rows channels (h i) (w j) -> rows channels h w", "mean", i=2, j=2)


def _mapped(
    x: Float[Array, "rows inputs"], parameters: Tree, context: Context, dims: tuple[str, str], out: str
) -> Float[Array, "rows outputs"]:
    product = context.pin(x @ context.gather(parameters["weight"], *dims), "batch", out)
    return product + context.gather(parameters["bias"], dims[1])[None, :]


STAGES = (64, 128, 256, 512)
BLOCKS = 2  # per stage


def _kernel(outputs: int, inputs: int, side: int) -> Parameter:
    return Parameter(shape=(outputs, inputs, side, side), dims=KERNEL, fan_in=inputs * side**2)


def _blocks() -> list[tuple[str, int, int]]:
    """Return each block's name, input and output channels; if these differ, the block halves the image."""
    found, channels = [], STAGES[0]
    for stage, width in enumerate(STAGES, start=1):
        for block in range(1, BLOCKS + 1):
            found.append((f"stage{stage}_block{block}", channels, width))
            channels = width
    return found


class ResNet:
    """ResNet-18 for square images of one channel and ten classes."""

    def __init__(self, config: ResNetModel) -> None:
        self.config = config

    def parameters(self) -> Tree:
        """Declare `stem`, `stage1_block1` to `stage4_block2`, and `head`."""
        found: Tree = {"stem": {"kernel": _kernel(STAGES[0], 1, 7), "norm": norm_parameters(STAGES[0])}}
        for name, inputs, outputs in _blocks():
            found[name] = {
                "kernel1": _kernel(outputs, inputs, 3),
                "norm1": norm_parameters(outputs),
                "kernel2": _kernel(outputs, outputs, 3),
                "norm2": norm_parameters(outputs),
            }
            if inputs != outputs:
                found[name]["shortcut"] = _kernel(outputs, inputs, 1)
        found["head"] = {
            "weight": Parameter(shape=(STAGES[-1], 10), dims=("embed", "one"), fan_in=STAGES[-1]),
            "bias": Parameter(shape=(10,), dims=("one",), initial="zeros"),
        }
        return found

    def state(self) -> Tree:
        """Declare the running mean and variance of every norm, under the parameters' names."""
        found: Tree = {"stem": {"norm": norm_state(STAGES[0])}}
        for name, _, outputs in _blocks():
            found[name] = {"norm1": norm_state(outputs), "norm2": norm_state(outputs)}
        return found

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean cross entropy in nats, and an outcome with new running statistics and `accuracy`.

        Args:
            batch: `images` [rows, 1, side, side], `labels` [rows] below 10, and optionally `weights` [rows].
        """
        norm = _Norm(state, batch, context, self.config.batch_norm)
        x = batch["images"].astype(context.dtype)
        with jax.named_scope("stem"):
            stem = parameters["stem"]
            x = jax.nn.relu(norm(_resnet_convolution(x, stem["kernel"], context, 2), stem, "stem", "norm"))
            x = _largest(x, context)
        for name, inputs, outputs in _blocks():
            with jax.named_scope(name):
                x = _block(x, parameters[name], context, norm, name, 1 if inputs == outputs else 2)
        with jax.named_scope("head"):
            x = context.pin(jnp.mean(x, axis=(2, 3)), "batch", "embed")
            weight = context.gather(parameters["head"]["weight"], "embed", "one")
            logits = context.pin(x @ weight, "batch", "embed")
            logits = logits + context.gather(parameters["head"]["bias"], "one")[None, :]
        loss, metrics = judged(logits, batch)
        return loss, Outcome(norm.state, metrics)


class _Norm:
    """The norms of one forward pass, and the state that they update."""

    def __init__(self, state: Tree, batch: Batch, context: Context, statistics: Statistics) -> None:
        self.state = {name: dict(norms) for name, norms in state.items()}
        self._weights = batch.get("weights")
        self._context = context
        self._statistics: Statistics = statistics

    def __call__(self, x: Array, parameters: Tree, module: str, name: str) -> Array:
        x, self.state[module][name] = batch_norm(
            x, parameters[name], self.state[module][name], self._context, self._statistics, self._weights
        )
        return x


def _block(x: Array, parameters: Tree, context: Context, norm: _Norm, name: str, stride: int) -> Array:
    y = jax.nn.relu(
        norm(_resnet_convolution(x, parameters["kernel1"], context, stride), parameters, name, "norm1")
    )
    y = norm(_resnet_convolution(y, parameters["kernel2"], context, 1), parameters, name, "norm2")
    if "shortcut" in parameters:
        x = _resnet_convolution(x, parameters["shortcut"], context, stride)
    return jax.nn.relu(x + y)


def _resnet_convolution(x: Array, kernel: Array, context: Context, stride: int) -> Array:
    """Convolve with padding of half the kernel on every side, which is PyTorch's convention."""
    pad = kernel.shape[-1] // 2
    used = context.gather(kernel, *KERNEL)
    y = jax.lax.conv_general_dilated(x, used, (stride, stride), [(pad, pad), (pad, pad)])
    return context.pin(y, "batch", "channels", "height", "width")


def _largest(x: Array, context: Context) -> Array:
    """Apply 3 x 3 max pooling with stride 2; pad the border with minus infinity."""
    window, strides, padding = (1, 1, 3, 3), (1, 1, 2, 2), [(0, 0), (0, 0), (1, 1), (1, 1)]
    y = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)
    return context.pin(y, "batch", "channels", "height", "width")
