"""Make queries, keys and values from latents, as DeepSeek-V2 does.

Source: DeepSeek-AI 2024 (https://arxiv.org/abs/2405.04434, section 2.1).
A token's residual is projected to a latent of width `latent_rank`, and that, after a norm, to the keys and
values of all heads. Positions turn the last `rotary_dim` numbers of queries and keys; in keys these numbers
come straight from the residual, one vector for all heads. In layers without positions (Kimi Linear) they are
as they come. Queries may come from a latent of their own.

Training holds the keys and values of all heads, as other attention does; the paper's absorbed products,
which save memory when text is generated, are not used. Over `tensor` each device makes the whole latents, and
the keys and values of its heads.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.config import TransformerModel
from meshwright.trainer.models import Context, Parameter
from meshwright.trainer.models.attention import HEADS, KV_HEADS
from meshwright.trainer.models.norms import normalised
from meshwright.trainer.models.products import Project
from meshwright.trainer.models.rotary import Turns, rotated

NORM_EPSILON = 1e-6  # of the latents' norms: DeepSeek's code fixes it, whatever its configuration says


def latent_parameters(config: TransformerModel) -> dict[str, Parameter]:
    """Declare the parameters of attention: `query_down` and `query_down_norm` only with `query_rank`."""
    c, rank, turned = config, config.latent_rank, config.rotary_dim
    assert rank is not None, "the model has no latent"
    assert turned is not None, "the configuration is checked"
    value = c.value_dim or c.head_dim
    kept = c.head_dim - turned

    def matrix(dims: tuple[str, ...], shape: tuple[int, ...], num_inputs: int = 1) -> Parameter:
        return Parameter(shape=shape, dims=dims, fan_in=math.prod(shape[:num_inputs]))

    def norm(size: int) -> Parameter:
        return Parameter(shape=(size,), dims=("rank",), initial="ones", wide=True)

    heads = ("latent", "heads", "head_dim")
    declared = {
        "key_down": matrix(("embed", "rank"), (c.embed_dim, rank)),
        "key_rotary": matrix(("embed", "rank"), (c.embed_dim, turned)),
        "key_down_norm": norm(rank),
        "key": matrix(heads, (rank, c.num_heads, kept)),
        "value": matrix(heads, (rank, c.num_heads, value)),
        "output": matrix(("heads", "head_dim", "embed"), (c.num_heads, value, c.embed_dim), 2),
    }
    if c.query_rank is None:
        query = matrix(("embed", "heads", "head_dim"), (c.embed_dim, c.num_heads, c.head_dim))
        return {**declared, "query": query}
    return {
        **declared,
        "query_down": matrix(("embed", "rank"), (c.embed_dim, c.query_rank)),
        "query_down_norm": norm(c.query_rank),
        "query": matrix(heads, (c.query_rank, c.num_heads, c.head_dim)),
    }


def latent_projections(
    h: Array,
    layer: dict[str, Any],
    project: Project,
    turns: Turns | None,
    places: Array | None,
    config: TransformerModel,
    context: Context,
) -> tuple[Array, Array, Array]:
    """Return query, key [batch, sequence, heads, head_dim] and value [..., value_dim], positions applied.

    Args:
        h: the normalised residual [batch, sequence, embed].
        layer: attention's parameters of one layer.
        project: multiplies with the matrix of a name.
        turns: those of `turns_of`; None in a layer without positions.
        places: each token's position, as for `rotated`.
    """
    c = config
    turned = c.rotary_dim
    assert turned is not None, "the configuration is checked"
    kept = c.head_dim - turned

    def normed(x: Array, name: str) -> Array:
        scale = context.gather(layer[name], "rank", wide=True)
        return normalised(x, scale, None, False, NORM_EPSILON, x.dtype)

    from_residual = c.query_rank is None
    query = project(h if from_residual else normed(project(h, "query_down"), "query_down_norm"), "query")
    latent = normed(project(h, "key_down"), "key_down_norm")
    key, value = project(latent, "key"), project(latent, "value")
    shared = project(h, "key_rotary")[:, :, None]
    shared = shared if turns is None else rotated(shared, turns, places)
    shared = jnp.broadcast_to(shared, (*key.shape[:3], turned))
    if turns is not None:
        query_turned = rotated(query[..., kept:], turns, places)
        query = context.pin(jnp.concatenate([query[..., :kept], query_turned], axis=-1), *HEADS)
    return query, context.pin(jnp.concatenate([key, shared], axis=-1), *KV_HEADS), value
