"""FLOPs of PyTorch's fused attention. No torch is imported.

Forward: two matrix products; backward: five, of which one repeats the scores (Dao et al. 2022,
arXiv 2205.14135). `is_causal` counts the allowed pairs of positions exactly: row i of the queries sees
the keys 0 to i (PyTorch aligns the mask at the top left). A mask given as a tensor is counted whole, since
its zeros are data. Groups of query heads share key heads: every query head counts.
"""

from __future__ import annotations

from ._calls import Call

# Packed sequences, whose lengths are values of a tensor, and windows, which no public layer sets.
LENGTHS_IN_DATA = ("cum_seq_q", "cu_seqlens_q", "window_size_left", "window_size_right", "window_size")


def allowed_pairs(queries: int, keys: int, *, causal: bool) -> int:
    """How many pairs of query and key positions meet."""
    if not causal:
        return queries * keys
    shorter = min(queries, keys)
    return shorter * (shorter + 1) // 2 + (queries - shorter) * keys


def _products(call: Call, *, sequence: int, heads: int) -> tuple[int, int] | None:
    """FLOPs of one product over the head's width, and of one over the values'; None: data tell."""
    corner = call.arguments.get("custom_mask_type")  # 1: causal from the top left; 2: from the bottom right
    if corner == 2 or any(call.arguments.get(name) is not None for name in LENGTHS_IN_DATA):
        return None
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    causal = corner == 1 or bool(call.arguments.get("is_causal"))
    pairs = query[0] * query[heads] * allowed_pairs(query[sequence], key[sequence], causal=causal)
    return 2 * pairs * query[-1], 2 * pairs * value[-1]


def _forward(call: Call, *, sequence: int = -2, heads: int = -3) -> int | None:
    found = _products(call, sequence=sequence, heads=heads)
    return None if found is None else sum(found)


def _backward(call: Call, *, sequence: int = -2, heads: int = -3) -> tuple[int, int] | None:
    """Gradients of queries and keys and the scores again, over the head's width; two over the values'."""
    found = _products(call, sequence=sequence, heads=heads)
    if found is None:
        return None
    scores, values = found
    return 3 * scores + 2 * values, scores


def _forward_sequence_first(call: Call) -> int | None:
    return _forward(call, sequence=-3, heads=-2)


def _backward_sequence_first(call: Call) -> tuple[int, int] | None:
    return _backward(call, sequence=-3, heads=-2)


_KINDS = (
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable",
)  # fmt: skip
ATTENTION_RULES = {
    **{f"_scaled_dot_product_{kind}": _forward for kind in _KINDS},
    **{f"_scaled_dot_product_{kind}_backward": _backward for kind in _KINDS},
    # The kernels below those: [batch, sequence, heads, head_dim].
    "_flash_attention_forward": _forward_sequence_first,
    "_flash_attention_backward": _backward_sequence_first,
    "_efficient_attention_forward": _forward_sequence_first,
    "_efficient_attention_backward": _backward_sequence_first,
    "_cudnn_attention_forward": _forward,
    "_cudnn_attention_backward": _backward,
}
