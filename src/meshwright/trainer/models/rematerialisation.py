"""Choose what a block saves for its backward pass; the rest is computed again (rematerialisation).

The blocks of a transformer name what is worth saving: the results of matrix products (`PRODUCT`, every
second one `SECOND_PRODUCT`), the residual after attention, attention's output, the statistics of norms, and
experts' buffers if they crossed `expert`. What lies between (norms, biases, gates, rotations) is cheap, and
the backward pass computes it again inside the kernels that read it. Nothing in float32 is saved by accident.
An activation without a gate is saved beside its input, for the next product's gradient reads it.

| policy | saves | known elsewhere as |
|---|---|---|
| `none` | everything but gathered weights | no recomputation |
| `dots-attention` | every product and attention | MaxText's `minimal_with_context` |
| `dots` | every product; attention runs again | Megatron-LM's selective recomputation, of `core_attn` |
| `alternate-dots` | attention and every second product | torchtitan's selective checkpointing, "op" |
| `full` | the block's input | "full" in Megatron-LM and torchtitan |
| `full-every-N` | `full` for every N-th block, `dots-attention` for others | torchtitan's selective, "N" |
| `save:NAMES` | the results that it names, and the block's input | MaxText's `save_qkv_proj` and others |

Megatron's selective recomputation keeps attention's output too, which the next product needs; here it comes
out of the attention that runs again. torchtitan counts a block's products in the order in which they run, and
keeps what a message over `tensor` brought; so no message is repeated.

A result may have two names: that of its group, as above, and its own (`config.RESULTS`), which a list names.
A list that lacks `context` attends again, from queries and keys that it kept or that are computed again. One
that has it keeps the log-sum-exp of the scores too, as Transformer Engine does under the name "context": the
attention kernel's backward pass needs both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.config import POLICIES, block_policies, saved_results
from meshwright.sharding import axis_size, num_shards

from ._base_model import Context
from .attention import NAME as ATTENTION
from .norms import STATISTICS

BLOCK_INPUT = "block_input"  # all that `full` saves; it may be offloaded to host memory
PRODUCT, AFTER_ATTENTION = "product", "after_attention"
SECOND_PRODUCT = "second_product"  # every second product of a block, which `alternate-dots` computes again
HIDDEN = "mlp_hidden"
EXPERTS = "expert_product"  # of experts: policies that save products save these
SECOND_EXPERTS = "second_expert_product"  # and these, unless they save every second product only
OTHER_NAMES = {"context": ATTENTION, "residual": AFTER_ATTENTION, "norms": STATISTICS}
"""The names here of results that a `save:` list calls otherwise and that no group shares."""
SCORES_RANK = 5  # batch, kv_heads, group, queries, keys: only attention has arrays of this rank


def rematerialised(block: Any, context: Context, scanned: bool) -> Any:
    """Wrap `block` in the run's rematerialisation policy.

    Args:
        scanned: the block runs in a loop. Otherwise a barrier keeps the compiler from merging what is
            computed again with what was computed before, which would keep it in memory.
    """
    if context.remat == "none" and num_shards(context.mesh) == 1 and context.held is None:
        return block
    assert block_policies(context.remat) == (context.remat,), "each block of a group has a policy of its own"
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
    if (kept := saved_results(context.remat)) is not None:
        saved = tuple(OTHER_NAMES.get(name, name) for name in kept)
        saved += ("attention",) if "context" in kept else ()
    else:
        named = POLICIES[context.remat]
        saved = named.saves + (named.saves_sent if axis_size(context.mesh, "tensor") > 1 else ())
    return jax.checkpoint(block, policy=_policy_that_saves(saved), prevent_cse=not scanned)


def _policy_that_saves(results: tuple[str, ...]) -> Any:
    """Return the policy of JAX that saves what any of these rules and names says."""
    policies, rules = jax.checkpoint_policies, [RULES[name] for name in results if name in RULES]
    if names := [name for name in results if name not in RULES]:
        rules.append(policies.save_only_these_names(*names))
    return functools.reduce(policies.save_from_both_policies, rules or [policies.nothing_saveable])


def _saves_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    # cuDNN's forward call. If its output and log-sum-exp were not saved, all of attention would run again.
    return primitive.name == "dot_product_attention_fwd_wrapper"


def _is_narrow(x: Any) -> bool:
    """Return whether an array has eight bits: two numbers of a matrix in four bits, or a number in fp8.

    Such an array is never saved. `jax.checkpoint` rounds what it saves to the format's bits as if all ones in
    the exponent were infinity. In E4M3 they are the numbers from 256 to 448, which would become NaN.
    """
    return getattr(x, "dtype", None) in (jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e5m2)


def _saves_all_but_gathered(primitive: Any, *operands: Any, **params: Any) -> bool:
    # A saved gathered weight would stay in memory until the backward pass uses it. Repeating casts and
    # gathers costs no arithmetic; every matmul is saved.
    if any(_is_narrow(operand) for operand in operands):
        return False
    if primitive.name == "custom_vjp_call":  # `gather`'s, or cuDNN's attention
        call = params["call_jaxpr"]
        if any(inner.primitive.name == "device_put" for inner in call.eqns):
            return False  # `fetched` from host memory: saved, all layers would be on the device
        gathers = any(_is_narrow(result) for result in call.out_avals)
        return not gathers and any(_saves_all_but_gathered(inner.primitive) for inner in call.eqns)
    if any(len(getattr(operand, "shape", ())) > SCORES_RANK - 1 for operand in operands):
        return False  # attention's blocks have their own checkpoint, and jax applies this policy to it too
    return primitive.name not in ("convert_element_type", "sharding_constraint", "all_gather")


RULES = {
    "all but gathered": _saves_all_but_gathered,
    "attention": _saves_attention,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""The rules of policies that also save results without a name."""
