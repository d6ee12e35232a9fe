"""What a block of layers keeps for the backward pass, and what is computed again there."""

from __future__ import annotations

from typing import Any

import jax

from ..sharding import num_shards
from ._base import Context
from .attention import NAME as ATTENTION_NAME
from .experts import NAME as EXPERT_NAME

SCORES_RANK = 5  # batch, kv_heads, group, queries, keys: nothing else of a block has as many dimensions
BLOCK_INPUT = "block_input"  # all that `full` saves; it may wait in host memory


def _saves_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    # cuDNN's forward call: its output and log-sum-exp; a second run would be all of attention again
    return primitive.name == "dot_product_attention_fwd_wrapper"


def _saves_all_but_gathered(primitive: Any, *operands: Any, **params: Any) -> bool:
    # Saved, a gathered weight would stay for the whole backward pass. Redoing casts and gathers is
    # no arithmetic; every matmul is kept.
    if primitive.name == "custom_vjp_call":  # `gather`'s, or cuDNN's attention
        return any(_saves_all_but_gathered(inner.primitive) for inner in params["call_jaxpr"].eqns)
    if any(len(getattr(operand, "shape", ())) > SCORES_RANK - 1 for operand in operands):
        return False  # blocks of attention have a checkpoint of their own, which jax asks this policy about
    return primitive.name not in ("convert_element_type", "sharding_constraint", "all_gather")


def rematerialised(block: Any, context: Context, scanned: bool) -> Any:
    """`block` under the run's rematerialisation policy."""
    if context.remat == "none" and num_shards(context.mesh) == 1:
        return block
    policies = jax.checkpoint_policies
    if context.offloads:
        assert context.remat == "full", f"remat {context.remat!r} saves more than a block's input"
        offloaded = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(block, policy=offloaded, prevent_cse=not scanned)
    dots = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(EXPERT_NAME)
    )
    policy = {
        "none": _saves_all_but_gathered,
        "dots": dots,
        "dots-attention": policies.save_from_both_policies(
            dots,
            policies.save_from_both_policies(
                policies.save_only_these_names(ATTENTION_NAME), _saves_attention
            ),
        ),
        "full": policies.nothing_saveable,
    }[context.remat]
    return jax.checkpoint(block, policy=policy, prevent_cse=not scanned)
