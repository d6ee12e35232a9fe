"""LeNet: two convolutions and two matrices, for images of 28 x 28 pixels and ten classes.

Arrays lie as in PyTorch: images [rows, channels, height, width], kernels [out, in, height, width]; matrices
are [in, out]. FLOPs by hand for N images, every multiply-add two:
    convolutions 2 N (20 26 26 (1 3 3) + 50 9 9 (20 5 5)), matrices 2 N (800 128 + 128 10)
forward; backward twice that, less the first convolution's once: nobody asks for the images' gradient.
"""

from __future__ import annotations

import jax
from einops import rearrange, reduce
from jaxtyping import Array, Float

from ._base import Batch, Context, Outcome, Parameter, Tree
from .classes import judged

KERNEL = ("channels_out", "channels_in", "height", "width")


class LeNet:
    """See the module."""

    def parameters(self) -> Tree:
        """`convolution1`, `convolution2`, `hidden`, `head`, each with `weight` and `bias`."""
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
        """Nothing."""
        return {}

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Mean cross entropy in nats; batch: images [rows, 1, 28, 28], labels [rows] below 10, and perhaps
        weights [rows]. The outcome has `accuracy`."""
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
    """Convolution without padding, bias, ReLU, means of 2 x 2; an odd last row or column is dropped."""
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
