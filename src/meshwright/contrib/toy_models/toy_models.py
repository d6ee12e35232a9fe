"""Define the small models: linear, deep linear (`Cruncher`), LeNet and ResNet-18.

`Linear` predicts inputs . weight (+ bias). `Cruncher` has `num_layers` square matrices and a head, without
biases. Both have one output and a mean squared error. FLOPs of `Cruncher` for batch B, width D and P
parameters: forward 2BP; backward 4BP - 2BD^2, since the gradient of the inputs is not computed.

The image models use PyTorch's layouts: images [rows, channels, height, width], kernels [out, in, height,
width]. Matrices are [in, out].

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

from meshwright.trainer.models import STATELESS, Batch, Context, Model, Outcome, Parameter, Tree

IMAGES = ("batch", "channels", "height", "width")
KERNEL = ("channels_out", "channels_in", "height", "width")


def _bias(size: int, dim: str) -> Parameter:
    return Parameter(shape=(size,), dims=(dim,), initial="zeros")


class Linear(Model):
    """The linear model with one output."""

    def parameters(self) -> Tree:
        """Declare `weight` [input_dim, 1] and, if the config asks for it, `bias` [1]."""
        width = self.config.input_dim
        declared = {"weight": Parameter(shape=(width, 1), dims=("embed", "one"), fan_in=width)}
        return {**declared, "bias": _bias(1, "one")} if self.config.bias else declared

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean squared error over the rows; batch: inputs [rows, input_dim], targets [rows]."""
        weight = context.gather(parameters["weight"], "embed", "one")
        prediction = (batch["inputs"].astype(context.dtype) @ weight)[:, 0].astype(jnp.float32)
        if self.config.bias:
            prediction = prediction + parameters["bias"]
        prediction = context.pin(prediction, "batch")
        return jnp.mean(jnp.square(prediction - batch["targets"])), STATELESS


class Cruncher(Model):
    """The deep linear model: square matrices and a head with one output."""

    def parameters(self) -> Tree:
        """Declare `layers`, a list of [width, width] matrices, and `head` [width, 1]."""
        width = self.config.width
        layer = Parameter(shape=(width, width), dims=("embed", "mlp"), fan_in=width)
        head = Parameter(shape=(width, 1), dims=("embed", "one"), fan_in=width)
        return {"layers": [layer] * self.config.num_layers, "head": head}

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean squared error over the rows; batch: inputs [rows, width], targets [rows]."""
        x = batch["inputs"].astype(context.dtype)
        for index, layer in enumerate(parameters["layers"]):
            with jax.named_scope(f"layer{index}"):
                x = context.pin(x @ context.gather(layer, "embed", "mlp"), "batch", "mlp")
                x = context.pin(x, "batch", "embed")
        with jax.named_scope("head"):
            prediction = context.pin(x @ context.gather(parameters["head"], "embed", "one"), "batch", "embed")
        return jnp.mean(jnp.square(prediction[:, 0].astype(jnp.float32) - batch["targets"])), STATELESS


def classification_loss(
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


class LeNet(Model):
    """LeNet for images of 28 x 28 pixels and ten classes."""

    def parameters(self) -> Tree:
        """Declare `convolution1`, `convolution2`, `hidden` and `head`, each with `weight` and `bias`."""
        layers = {  # shape and dimensions of the weight, dimension of the bias
            "convolution1": ((20, 1, 3, 3), KERNEL, 0),
            "convolution2": ((50, 20, 5, 5), KERNEL, 0),
            "hidden": ((800, 128), ("embed", "mlp"), 1),
            "head": ((128, 10), ("mlp", "one"), 1),
        }
        return {
            name: {
                "weight": Parameter(shape=shape, dims=dims, fan_in=math.prod(shape) // shape[out]),
                "bias": _bias(shape[out], dims[out]),
            }
            for name, (shape, dims, out) in layers.items()
        }

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
                x = _convolved_and_pooled(x, parameters[name], context)
        x = rearrange(x, "rows channels height width -> rows (channels height width)")
        with jax.named_scope("hidden"):
            x = jax.nn.relu(_mapped(x, parameters["hidden"], context, ("embed", "mlp"), "mlp"))
        with jax.named_scope("head"):
            logits = _mapped(x, parameters["head"], context, ("mlp", "one"), "embed")
        loss, metrics = classification_loss(logits, batch)
        return loss, Outcome({}, metrics)


def _convolved_and_pooled(
    x: Float[Array, "rows channels height width"], parameters: Tree, context: Context
) -> Float[Array, "rows channels_out half_height half_width"]:
    """Apply an unpadded convolution, bias, ReLU and 2 x 2 mean pooling; drop an odd last row or column."""
    kernel = context.gather(parameters["weight"], *KERNEL)
    x = context.pin(jax.lax.conv(x, kernel, window_strides=(1, 1), padding="VALID"), *IMAGES)
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
    widths = [width for width in STAGES for _ in range(BLOCKS)]
    names = [
        f"stage{stage}_block{block + 1}" for stage in range(1, len(STAGES) + 1) for block in range(BLOCKS)
    ]
    return list(zip(names, [STAGES[0], *widths], widths, strict=False))


class ResNet(Model):
    """ResNet-18 for square images of one channel and ten classes."""

    def parameters(self) -> Tree:
        """Declare `stem`, `stage1_block1` to `stage4_block2`, and `head`."""
        declared: Tree = {"stem": {"kernel": _kernel(STAGES[0], 1, 7), "norm": norm_parameters(STAGES[0])}}
        for name, inputs, outputs in _blocks():
            declared[name] = {
                "kernel1": _kernel(outputs, inputs, 3),
                "norm1": norm_parameters(outputs),
                "kernel2": _kernel(outputs, outputs, 3),
                "norm2": norm_parameters(outputs),
            }
            if inputs != outputs:
                declared[name]["shortcut"] = _kernel(outputs, inputs, 1)
        weight = Parameter(shape=(STAGES[-1], 10), dims=("embed", "one"), fan_in=STAGES[-1])
        return {**declared, "head": {"weight": weight, "bias": _bias(10, "one")}}

    def state(self) -> Tree:
        """Declare the running mean and variance of every norm, under the parameters' names."""
        blocks = {name: {"norm1": norm_state(out), "norm2": norm_state(out)} for name, _, out in _blocks()}
        return {"stem": {"norm": norm_state(STAGES[0])}, **blocks}

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean cross entropy in nats, and an outcome with new running statistics and `accuracy`.

        Args:
            batch: `images` [rows, 1, side, side], `labels` [rows] below 10, and optionally `weights` [rows].
        """
        new_state: Tree = {name: {} for name in state}

        def norm(x: Array, module: str, name: str) -> Array:
            x, new_state[module][name] = batch_norm(
                x, parameters[module][name], state[module][name], context, self.config.batch_norm,
                batch.get("weights"),
            )  # fmt: skip
            return x

        def block(x: Array, module: str, stride: int) -> Array:
            kernels = parameters[module]
            y = jax.nn.relu(norm(_convolved(x, kernels["kernel1"], context, stride), module, "norm1"))
            y = norm(_convolved(y, kernels["kernel2"], context, 1), module, "norm2")
            if "shortcut" in kernels:
                x = _convolved(x, kernels["shortcut"], context, stride)
            return jax.nn.relu(x + y)

        x = batch["images"].astype(context.dtype)
        with jax.named_scope("stem"):
            x = jax.nn.relu(norm(_convolved(x, parameters["stem"]["kernel"], context, 2), "stem", "norm"))
            x = _largest(x, context)
        for name, inputs, outputs in _blocks():
            with jax.named_scope(name):
                x = block(x, name, 1 if inputs == outputs else 2)
        with jax.named_scope("head"):
            x = context.pin(jnp.mean(x, axis=(2, 3)), "batch", "embed")
            logits = _mapped(x, parameters["head"], context, ("embed", "one"), "embed")
        loss, metrics = classification_loss(logits, batch)
        return loss, Outcome(new_state, metrics)


def _convolved(x: Array, kernel: Array, context: Context, stride: int) -> Array:
    """Convolve with padding of half the kernel on every side, which is PyTorch's convention."""
    pad = kernel.shape[-1] // 2
    used = context.gather(kernel, *KERNEL)
    y = jax.lax.conv_general_dilated(x, used, (stride, stride), [(pad, pad), (pad, pad)])
    return context.pin(y, *IMAGES)


def _largest(x: Array, context: Context) -> Array:
    """Apply 3 x 3 max pooling with stride 2; pad the border with minus infinity."""
    window, strides, padding = (1, 1, 3, 3), (1, 1, 2, 2), [(0, 0), (0, 0), (1, 1), (1, 1)]
    return context.pin(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding), *IMAGES)


KEPT = 0.9  # share of a running statistic that each step keeps
EPSILON = 1e-5

Statistics = Literal["global", "replica"]


def norm_parameters(channels: int) -> Tree:
    """Declare `scale` and `bias` of a batch normalisation."""
    scale = Parameter(shape=(channels,), dims=("channels_out",), initial="ones")
    return {"scale": scale, "bias": _bias(channels, "channels_out")}


def norm_state(channels: int) -> Tree:
    """Declare the running `mean` and `variance` of a batch normalisation."""
    variance = Parameter(shape=(channels,), dims=("channels_out",), initial="ones")
    return {"mean": _bias(channels, "channels_out"), "variance": variance}


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
        mean, variance = (state[name].reshape(1, -1, 1, 1) for name in ("mean", "variance"))
        return _scaled(x, mean, variance, scale, bias), state
    replicas = math.prod(context.mesh.shape.get(axis, 1) for axis in ("data", "fsdp"))
    num_groups = replicas if statistics == "replica" else 1
    y = rearrange(x, "(groups rows) ... -> groups rows ...", groups=num_groups)
    if num_groups > 1:
        y = context.pin(y, "batch", "replica_rows", *IMAGES[1:])
    counted = jnp.ones(y.shape[:2], jnp.float32)
    if weights is not None:
        counted = (weights > 0).astype(jnp.float32).reshape(y.shape[:2])
    mean, variance, count = _statistics(y, counted)
    y = _scaled(y, mean, variance, scale, bias)
    return context.pin(y.reshape(x.shape), *IMAGES), _moved(state, mean, variance, count)


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
        batch_mean = jnp.sum(filled[:, None] * new, axis=0) / jnp.maximum(num_filled, 1.0)
        return jnp.where(num_filled > 0, KEPT * old + (1 - KEPT) * batch_mean, old)

    moved = {
        "mean": one(state["mean"], mean[:, 0, :, 0, 0]),
        "variance": one(state["variance"], variance[:, 0, :, 0, 0] * unbiased[:, None]),
    }
    return jax.lax.stop_gradient(moved)
