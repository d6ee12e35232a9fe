"""Mix tokens by Mamba-2, in attention's place, as Nemotron-H and Granite 4 do.

A head's input x, the group's B and C, a gate z and a step of time for each head are projected; x, B and C
pass a short causal convolution and silu. They drive the states of `chunked_scan` as values (x times the
step), keys (B) and queries (C): a state decays by exp(-exp(log_rate) x step), where the step is
softplus(step + step_bias). A head's output adds `skip` x x, is multiplied by silu(z), and is then normed over
the numbers of its group.

Source: Dao and Gu 2024 (https://arxiv.org/abs/2405.21060).

Layouts: `tensor` splits heads; groups fewer than its devices are repeated as attention's key heads are, and
each norm then sums over `tensor`. Over `context` the order is attention's (`pieces`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.config import TransformerModel
from meshwright.trainer.models import Context, Parameter
from meshwright.trainer.models.attention import HEADS, Documents
from meshwright.trainer.models.products import Project

from .chunked_scan import Steps
from .state_mixer import CHANNELS, Arrays, mixed, with_convolutions


def mamba_parameters(config: TransformerModel) -> dict[str, Parameter]:
    """Declare the parameters of Mamba-2: B is `key`, C `query`, x `value`, z `output_gate` and dt `step`."""
    c, heads = config, config.mamba_heads
    head_dim, groups, state_dim = c.mamba_head_dim, c.mamba_groups, c.mamba_state_dim
    assert None not in (heads, head_dim, groups, state_dim), "the configuration is checked"
    inner, shared = (heads or 0, head_dim or 0), (groups or 0, state_dim or 0)
    inner_dims, shared_dims = ("heads", "head_dim"), ("kv_heads", "head_dim")

    def from_residual(dims: tuple[str, ...], shape: tuple[int, ...]) -> Parameter:
        return Parameter(shape=(c.embed_dim, *shape), dims=("embed", *dims), fan_in=c.embed_dim)

    of_head = Parameter(shape=inner[:1], dims=("heads",), initial="ones", wide=True)
    declared = {
        "query": from_residual(shared_dims, shared),
        "key": from_residual(shared_dims, shared),
        "value": from_residual(inner_dims, inner),
        "output_gate": from_residual(inner_dims, inner),
        "step": from_residual(("heads",), inner[:1]),
        "output": Parameter(
            shape=(*inner, c.embed_dim), dims=(*inner_dims, "embed"), fan_in=math.prod(inner)
        ),
        "skip": of_head,
        "log_rate": Parameter(shape=inner[:1], dims=("heads",), initial="rates", wide=True),
        "step_bias": Parameter(shape=inner[:1], dims=("heads",), initial="steps", wide=True),
        "norm": Parameter(shape=inner, dims=inner_dims, initial="ones", wide=True),
    }
    return with_convolutions(declared, c)


def apply_mamba(
    h: Array,
    layer: dict[str, Any],
    project: Project,
    config: TransformerModel,
    context: Context,
    documents: Documents | None,
) -> Array:
    """Return heads' outputs, gated and normed, for the product with `output`: [batch, sequence, heads, dim].

    Args:
        h: the normalised residual [batch, sequence, embed]; over `context` in ring order.
        layer: the parameters of one layer, which `mamba_parameters` declares.
        project: multiplies with the matrix of a name.
        config: of the model.
        context: of the run.
        documents: of windows that hold several.
    """
    dtype, groups = h.dtype, config.mamba_groups
    assert groups is not None, "the configuration is checked"
    inputs = {name: project(h, name) for name in (*CHANNELS, "step", "output_gate")}

    def steps_of(inputs: Arrays, vectors: Arrays) -> tuple[Steps, Array]:
        step = jax.nn.softplus(inputs["step"].astype(jnp.float32) + vectors["step_bias"][None, None])
        step = jnp.maximum(step, config.mamba_least_step) if config.mamba_least_step else step
        decay = -jnp.exp(vectors["log_rate"])[None, None] * step
        query, key, x = (inputs[name] for name in CHANNELS)
        value = (x * step[..., None]).astype(dtype)
        steps = Steps(query.astype(dtype), key.astype(dtype), value, decay, None)
        return steps, x * vectors["skip"][None, None, :, None]

    def normed(read: Array, scale: Array, gate: Array) -> Array:
        y = read.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        # The sums of squares of heads are added up: they are few, wherever the heads of a group are.
        of_heads = jnp.mean(jnp.square(y), axis=-1)
        of_groups = jnp.mean(of_heads.reshape(*of_heads.shape[:2], groups, -1), axis=-1, keepdims=True)
        inverse = jax.lax.rsqrt(of_groups + config.norm_epsilon)
        inverse = jnp.broadcast_to(inverse, (*inverse.shape[:3], of_heads.shape[2] // groups))
        inverse = context.pin(inverse.reshape(of_heads.shape), *HEADS[:3])
        return (y * inverse[..., None] * scale[None, None]).astype(dtype)

    return mixed(inputs, layer, mamba_parameters(config), steps_of, normed, config, context, documents)
