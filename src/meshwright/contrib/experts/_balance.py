"""Move the bias by which routers choose experts, so that all experts get equally many tokens.

Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts"
(https://arxiv.org/abs/2408.15664), algorithm 1, as DeepSeek-V3 trained: after a step, the bias of an expert
falls by a fixed rate if it got more tokens than the mean, and rises if it got fewer.

The model gives the excess of tokens over the mean as if it were the bias's gradient
(`experts.py:counted_for_bias`), so that it is summed over microbatches and devices as gradients are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Tree = Any
BIAS = "router_bias"


def without_excess(gradient: Tree) -> Tree:
    """Return a gradient with zeros for experts' excess tokens, which have no part in norms and moments."""
    return jax.tree_util.tree_map_with_path(
        lambda path, each: jnp.zeros_like(each) if _is_bias(path) else each, gradient
    )


def with_moved_bias(new: Tree, old: Tree, gradient: Tree, rate: float) -> Tree:
    """Return the new parameters, with each router's bias as it was, moved by `rate` against its excess."""

    def moved(path: tuple[Any, ...], new: Array, old: Array, excess: Array) -> Array:
        return old - rate * jnp.sign(excess).astype(old.dtype) if _is_bias(path) else new

    return jax.tree_util.tree_map_with_path(moved, new, old, gradient)


def _is_bias(path: tuple[Any, ...]) -> bool:
    return getattr(path[-1], "key", None) == BIAS
