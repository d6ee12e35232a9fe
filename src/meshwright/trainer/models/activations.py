"""Compute the hidden units of an MLP: an activation, alone or as the gate of another product.

gpt-oss bounds both products of a gated MLP and adds 1 to the one that is gated (OpenAI 2025,
https://github.com/openai/gpt-oss, gpt_oss/torch/model.py:swiglu). Its gate is x sigmoid(1.702 x), the
approximation of GELU by Hendrycks and Gimpel 2016 (https://arxiv.org/abs/1606.08415).

xIELU has learned numbers (Huang and Schlag 2024, https://arxiv.org/abs/2411.13010): a x^2 + x / 2 above zero,
and below it b (e^x - 1 - x) + x / 2, with a = softplus(`alpha_p`) and b = 1 / 2 + softplus(`alpha_n`).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.config import TransformerModel

from ._base_model import Parameter

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu-erf": partial(jax.nn.gelu, approximate=False),
    "gelu-quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
LEARNED = ("alpha_p", "alpha_n")  # of an xIELU, in float32
BETA = 0.5
JUST_BELOW_ZERO = -1e-6  # the largest number whose e^x - 1 is taken
FIRST_SLOPE = 0.8  # both a and b begin with it


def hidden_units(
    up: Array, gate: Array | None, config: TransformerModel, learned: tuple[Array, ...] = ()
) -> Array:
    """Return the hidden units of an MLP from its products; `gate` is None in a plain one.

    Args:
        learned: the numbers of `LEARNED`, repeated to the shape of `up`, for an xIELU.
    """
    if config.activation == "xielu":
        return _xielu(up, *learned)
    activation, limit = ACTIVATIONS[config.activation], config.gate_limit
    if gate is None:
        return activation(up)
    if limit is None:
        return activation(gate) * up
    return activation(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)


def xielu_parameters() -> dict[str, Parameter]:
    """Declare the two learned numbers of a layer's xIELU."""
    firsts = (FIRST_SLOPE, FIRST_SLOPE - BETA)
    return {
        name: Parameter(
            shape=(1,), dims=("one",), initial="ones", gain=math.log(math.expm1(first)), wide=True
        )
        for name, first in zip(LEARNED, firsts, strict=True)
    }


def _xielu(x: Array, alpha_p: Array, alpha_n: Array) -> Array:
    above = jax.nn.softplus(alpha_p) * x * x
    below = (BETA + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x, JUST_BELOW_ZERO)) - x)
    return jnp.where(x > 0, above, below) + BETA * x
