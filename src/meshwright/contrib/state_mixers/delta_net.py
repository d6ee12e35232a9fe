"""Mix tokens by a gated delta net, in attention's place: that of Qwen3-Next, or KDA with decays per channel.

Queries, keys and values are projected, pass a short causal convolution and silu, and drive the states of
`chunked_scan`; queries and keys have length one. A head's state decays by exp(-exp(log_rate) x
softplus(decay + step_bias)) at each token, and takes the share sigmoid(beta) of the new value. What a head
reads is normed, and multiplied by a gate.

Sources: Yang et al. 2024 (https://arxiv.org/abs/2412.06464) as in Qwen3-Next; with `delta_rank`, Kimi Linear
(https://arxiv.org/abs/2510.26692), whose decays, one for each key dimension, and gates come from latents.

Layouts: `tensor` splits heads; key heads fewer than its devices are repeated as in attention. Over `context`
the order is attention's (`pieces`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.config import TransformerModel
from meshwright.trainer.models import Context, Parameter
from meshwright.trainer.models.attention import Documents
from meshwright.trainer.models.norms import normalised
from meshwright.trainer.models.products import Project

from .chunked_scan import Steps
from .state_mixer import CHANNELS, Arrays, mixed, with_convolutions

LENGTH_EPSILON = 1e-6  # added to the squared length of queries and keys; flash-linear-attention fixes it
GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def delta_parameters(config: TransformerModel) -> dict[str, Parameter]:
    """Declare the parameters of a gated delta net."""
    c, rank = config, config.delta_rank
    heads, value_dim = c.delta_heads, c.delta_value_dim
    key_heads, key_dim = c.delta_key_heads, c.delta_key_dim
    assert None not in (heads, value_dim, key_heads, key_dim), "the configuration is checked"
    keys = ("kv_heads", key_heads or 0), ("head_dim", key_dim or 0)
    values = ("heads", heads or 0), ("head_dim", value_dim or 0)
    width = ("embed", c.embed_dim)

    def matrix(*sizes: tuple[str, int], num_inputs: int = 1) -> Parameter:
        dims, shape = zip(*sizes, strict=True)
        return Parameter(shape=shape, dims=dims, fan_in=math.prod(shape[:num_inputs]))

    declared = {
        "query": matrix(width, *keys),
        "key": matrix(width, *keys),
        "value": matrix(width, *values),
        "beta": matrix(width, values[0]),
        "output": matrix(*values, width, num_inputs=2),
        "log_rate": Parameter(shape=(heads or 0,), dims=("heads",), initial="rates", wide=True),
        "norm": Parameter(shape=(value_dim or 0,), dims=("head_dim",), initial="ones", wide=True),
    }
    if rank is None:
        declared |= {"decay": matrix(width, values[0]), "output_gate": matrix(width, *values)}
    else:
        channels = values[0], keys[1]
        for name, sizes in (("decay", channels), ("output_gate", values)):
            declared |= {
                f"{name}_down": matrix(width, ("rank", rank)),
                name: matrix(("latent", rank), *sizes),
            }
    shape, dims = declared["decay"].shape[1:], declared["decay"].dims[1:]
    declared["step_bias"] = Parameter(shape=shape, dims=dims, initial="steps", wide=True)
    return with_convolutions(declared, c)


def apply_delta(
    h: Array,
    layer: dict[str, Any],
    project: Project,
    config: TransformerModel,
    context: Context,
    documents: Documents | None,
) -> Array:
    """Return what heads read, normed and gated, for the product with `output`: [batch, sequence, heads, dim].

    Args:
        h: the normalised residual [batch, sequence, embed]; over `context` in ring order.
        layer: the parameters of one layer, which `delta_parameters` declares.
        project: multiplies with the matrix of a name.
        config: of the model.
        context: of the run.
        documents: of windows that hold several.
    """
    by_channel, dtype = config.delta_rank is not None, h.dtype
    inputs = {name: project(h, name) for name in (*CHANNELS, "beta")}
    for name in ("decay", "output_gate"):
        inputs[name] = project(project(h, f"{name}_down") if by_channel else h, name)

    def steps_of(inputs: Arrays, vectors: Arrays) -> tuple[Steps, None]:
        wide = {name: x.astype(jnp.float32) for name, x in inputs.items()}
        query, key = (_of_length_one(wide[name]) for name in ("query", "key"))
        query = query * query.shape[-1] ** -0.5
        rate = jnp.exp(vectors["log_rate"])
        rate = rate[None, None, :, None] if by_channel else rate[None, None]
        decay = -rate * jax.nn.softplus(wide["decay"] + vectors["step_bias"][None, None])
        query, key, value = (x.astype(dtype) for x in (query, key, wide["value"]))
        return Steps(query, key, value, decay, jax.nn.sigmoid(wide["beta"])), None

    def normed(read: Array, scale: Array, gate: Array) -> Array:
        y = normalised(read, scale, None, False, config.norm_epsilon, jnp.float32)
        return (y * GATES[config.delta_gate](gate.astype(jnp.float32))).astype(dtype)

    declared = delta_parameters(config)
    return mixed(inputs, layer, declared, steps_of, normed, config, context, documents)


def _of_length_one(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + LENGTH_EPSILON)
