"""Define the activations of MLPs, and xIELU, which has learned numbers.

xIELU (Huang and Schlag 2024, https://arxiv.org/abs/2411.13010): a x^2 + x / 2 above zero, and below it
b (e^x - 1 - x) + x / 2, with a = softplus(`alpha_p`) and b = 1 / 2 + softplus(`alpha_n`).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._base_model import Parameter

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu-erf": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
LEARNED = ("alpha_p", "alpha_n")  # of an xIELU, in float32
BETA = 0.5
JUST_BELOW_ZERO = -1e-6  # the largest number whose e^x - 1 is taken
FIRST_SLOPE = 0.8  # both a and b begin with it


def xielu_parameters() -> dict[str, Parameter]:
    """Declare the two learned numbers of a layer's xIELU."""
    softplus_of = {"alpha_p": FIRST_SLOPE, "alpha_n": FIRST_SLOPE - BETA}
    return {
        name: Parameter(
            shape=(1,), dims=("one",), initial="ones", gain=math.log(math.expm1(value)), wide=True
        )
        for name, value in softplus_of.items()
    }


def xielu(
    x: Float[Array, "*tokens mlp"], alpha_p: Float[Array, "*tokens mlp"], alpha_n: Float[Array, "*tokens mlp"]
) -> Float[Array, "*tokens mlp"]:
    """Return xIELU of `x`; `alpha_p` and `alpha_n` are the learned numbers, repeated to its shape."""
    above = jax.nn.softplus(alpha_p) * x * x
    below = (BETA + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x, JUST_BELOW_ZERO)) - x)
    return jnp.where(x > 0, above, below) + BETA * x
