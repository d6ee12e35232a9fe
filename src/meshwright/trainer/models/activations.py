"""Compute the hidden units of an MLP: an activation, alone or as the gate of another product.

gpt-oss bounds both products of a gated MLP and adds 1 to the one that is gated (OpenAI 2025,
https://github.com/openai/gpt-oss, gpt_oss/torch/model.py:swiglu). Its gate is x sigmoid(1.702 x), the
approximation of GELU by Hendrycks and Gimpel 2016 (https://arxiv.org/abs/1606.08415).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.config import TransformerModel

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu-erf": partial(jax.nn.gelu, approximate=False),
    "gelu-quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


def hidden_units(up: Array, gate: Array | None, config: TransformerModel) -> Array:
    """Return the hidden units of an MLP from its products; `gate` is None in a plain one."""
    activation, limit = ACTIVATIONS[config.activation], config.gate_limit
    if gate is None:
        return activation(up)
    if limit is None:
        return activation(gate) * up
    return activation(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)
