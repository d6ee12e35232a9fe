"""cuDNN's attention with the log-sum-exp of each query, forward and backward.

`jax.nn.dot_product_attention` rounds the log-sum-exp to the format of the computation and has no gradient
that takes one from outside; a ring needs both. So this reaches into `jax._src`, here and nowhere else. The
flash kernel's gradient is exact for a part of the keys, if it is given output and log-sum-exp over all.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jaxtyping import Array, Float

LogSumExp = Float[Array, "batch heads queries"]
SEED = 42  # of dropout, which is 0
# From jax 0.12 on a function may change the scores (flex attention); these are left as they are.
SCORES_AS_THEY_ARE: dict[str, None] = (
    {"score_mod": None}
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters  # pyright: ignore[reportPrivateUsage]
    else {}
)


def _mask(causal: bool) -> cudnn.MaskType:
    return cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK


def forward(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    causal: bool,
) -> tuple[Float[Array, "batch queries heads head_dim"], LogSumExp]:
    """What the queries see of these keys, in their format, and the log-sum-exp of their scores in float32."""
    both: Any = cudnn.dot_product_attention(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5,
        mask_type=_mask(causal),
        return_residual=True,
    )
    out, log_sum_exp = both
    return out, log_sum_exp


def backward(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    causal: bool,
    log_sum_exp: LogSumExp,
    out: Float[Array, "batch queries heads head_dim"],
    d_out: Float[Array, "batch queries heads head_dim"],
) -> tuple[Array, Array, Array]:
    """What these keys give to the gradients of query, key and value, in their format.

    Args:
        log_sum_exp: over all the keys that the queries see, not these alone.
        out: the same.
    """
    none = jnp.zeros(0, query.dtype)  # bias, lengths, offsets and pages
    d_query, d_key, d_value = cudnn._dot_product_attention_bwd_p_wrapper.bind(  # pyright: ignore[reportPrivateUsage]
        *(query, key, value, *(none,) * 7, log_sum_exp, out, d_out),
        scale=query.shape[-1] ** -0.5,
        seed=SEED,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=_mask(causal),
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **SCORES_AS_THEY_ARE,
    )
    return d_query, d_key, d_value
