"""ResNet-18 for square images in one channel and ten classes (He et al. 2015, https://arxiv.org/abs/1512.03385).

Stem: 7 x 7 to 64 channels, stride 2, norm, ReLU, largest of 3 x 3 with stride 2. Four stages of two blocks,
of 64, 128, 256 and 512 channels; the first block of each stage but the first halves the image. A block is
3 x 3, norm, ReLU, 3 x 3, norm, plus its input (through 1 x 1 with the block's stride where the shape
changes, as it comes, without a norm), ReLU. Then the mean over the image, and a matrix to the logits.

No convolution has a bias: a norm would subtract it again, and that of a 1 x 1 would add to its block's last.
Arrays lie as in `lenet`. FLOPs by hand are in tests/test_oracle_flops.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..config import ResNetModel
from ._base import Batch, Context, Outcome, Parameter, Tree
from .classes import judged
from .lenet import KERNEL
from .normalisation import Statistics, batch_norm, norm_parameters, norm_state

STAGES = (64, 128, 256, 512)
BLOCKS = 2  # of each stage


def _kernel(outputs: int, inputs: int, side: int) -> Parameter:
    return Parameter(shape=(outputs, inputs, side, side), dims=KERNEL, fan_in=inputs * side**2)


def _blocks() -> list[tuple[str, int, int]]:
    """Name, channels in and channels out of every block; where they differ it halves the image."""
    found, channels = [], STAGES[0]
    for stage, width in enumerate(STAGES, start=1):
        for block in range(1, BLOCKS + 1):
            found.append((f"stage{stage}_block{block}", channels, width))
            channels = width
    return found


class ResNet:
    """See the module."""

    def __init__(self, config: ResNetModel) -> None:
        self.config = config

    def parameters(self) -> Tree:
        """`stem`, `stage1_block1` .. `stage4_block2`, `head`."""
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
        """Running mean and variance of every norm, under the parameters' names."""
        found: Tree = {"stem": {"norm": norm_state(STAGES[0])}}
        for name, _, outputs in _blocks():
            found[name] = {"norm1": norm_state(outputs), "norm2": norm_state(outputs)}
        return found

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Mean cross entropy in nats; batch: images [rows, 1, side, side], labels [rows] below 10, and
        perhaps weights [rows]. The outcome has the new running statistics and `accuracy`."""
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
    """Every norm of one pass, and the state they leave."""

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
    y = jax.nn.relu(norm(_resnet_convolution(x, parameters["kernel1"], context, stride), parameters, name, "norm1"))
    y = norm(_resnet_convolution(y, parameters["kernel2"], context, 1), parameters, name, "norm2")
    if "shortcut" in parameters:
        x = _resnet_convolution(x, parameters["shortcut"], context, stride)
    return jax.nn.relu(x + y)


def _resnet_convolution(x: Array, kernel: Array, context: Context, stride: int) -> Array:
    """Padded by half the kernel, as PyTorch counts it: the same on every side."""
    pad = kernel.shape[-1] // 2
    used = context.gather(kernel, *KERNEL)
    y = jax.lax.conv_general_dilated(x, used, (stride, stride), [(pad, pad), (pad, pad)])
    return context.pin(y, "batch", "channels", "height", "width")


def _largest(x: Array, context: Context) -> Array:
    """The largest of every 3 x 3 places, two apart; the border is padded with minus infinity."""
    window, strides, padding = (1, 1, 3, 3), (1, 1, 2, 2), [(0, 0), (0, 0), (1, 1), (1, 1)]
    y = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)
    return context.pin(y, "batch", "channels", "height", "width")
