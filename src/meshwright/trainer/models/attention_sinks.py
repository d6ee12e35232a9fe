"""Add a sink to attention: a learned score of each head, to which no value belongs (gpt-oss).

With a sink s, a query's weights are exp(score) / (exp(s) + the sum over all keys of exp(score)), and sum to
less than 1 (OpenAI 2025, https://arxiv.org/abs/2508.10925, section 2.2; Xiao et al. 2023, arXiv 2309.17453).
With the log-sum-exp L of the scores, the output is that of attention without a sink, divided by
1 + exp(s - L), and the log-sum-exp with the sink is log(exp(L) + exp(s)). So every kernel that returns L
attends with sinks, fused ones and those over `context` included. Their backward passes compute weights from
the output and the log-sum-exp that they are given. Given those with sinks, their gradients are those of
attention with sinks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def with_sinks(
    out: Float[Array, "batch queries heads value_dim"],
    log_sum_exp: Float[Array, "batch heads queries"],
    sinks: Float[Array, " heads"],
) -> tuple[Array, Array]:
    """Return output and log-sum-exp of attention with sinks, from those without."""
    scores = sinks[None, :, None]
    share = jax.nn.sigmoid(log_sum_exp - scores).swapaxes(1, 2)[..., None]
    scaled = (out.astype(jnp.float32) * share).astype(out.dtype)
    return scaled, jnp.logaddexp(log_sum_exp, scores)


def gradient_of_sinks(
    out: Float[Array, "batch queries heads value_dim"],
    log_sum_exp: Float[Array, "batch heads queries"],
    sinks: Float[Array, " heads"],
    d_out: Float[Array, "batch queries heads value_dim"],
) -> Float[Array, " heads"]:
    """Return the gradient of the sinks, in float32.

    A sink has no value, so the gradient of its score is minus its weight times the product of output and its
    gradient.

    Args:
        out, log_sum_exp: with the sinks.
        sinks: their scores.
        d_out: the gradient of `out`.
    """
    product = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    weights = jnp.exp(sinks[None, :, None] - log_sum_exp)
    return -jnp.sum(weights * product.swapaxes(1, 2), axis=(0, 2))
