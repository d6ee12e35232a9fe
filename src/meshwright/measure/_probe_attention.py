"""The probe of attention: the fused kernel forward, and backward by what a gradient takes more. With jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..predict import MeasuredAttention
from ._best import best_seconds

LENGTHS = (1024, 4096, 16384)
HEAD_SIZES = (64, 128)
HEADS, TOKENS = 8, 16384  # of one launch: enough to fill a device
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # the backward kernel computes the scores again
LEAST_SECONDS = 1e-9  # the clock's tick: a difference that noise turned negative is one


def attention_rates() -> tuple[MeasuredAttention, ...]:
    """Of cuDNN's kernel on a GPU; none elsewhere, where a program's attention is several kernels."""
    if jax.local_devices()[0].platform != "gpu":
        return ()
    return tuple(
        measured(head, length, TOKENS // length, "cudnn") for head in HEAD_SIZES for length in LENGTHS
    )


def measured(head_size: int, length: int, sequences: int, implementation: Any) -> MeasuredAttention:
    """Causal attention in bf16; FLOPs by the half of the scores that is needed."""
    queries = jnp.full((sequences, length, HEADS, head_size), 1e-2, jnp.bfloat16)

    def attend(x: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation=implementation)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda q: attend(q).astype(jnp.float32).sum())(x)

    product = (
        sequences * length * length * HEADS * head_size
    )  # of the halved scores, a multiply-add counted twice
    forward, both = best_seconds(attend, (queries,)), best_seconds(gradient, (queries,))
    return MeasuredAttention(
        head_size=head_size,
        length=length,
        forward_flops_per_second=FORWARD_PRODUCTS * product / forward,
        backward_flops_per_second=BACKWARD_PRODUCTS * product / max(both - forward, LEAST_SECONDS),
    )
