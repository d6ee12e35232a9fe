"""Which part of the model an operation belongs to, and how much of it counts, by the path in its `op_name`.

JAX puts the caller's scopes (`jax.named_scope`, Flax modules) into that path, between what it names itself:
transformations (`jvp(layers)`), loops, calls and, last, the primitive. What is left of
"jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp_block/up/dot_general" is "layers/mlp_block/up".

Scopes of ours tell those who count what the program alone does not: `needed_A_of_B`, that A / B of the
arithmetic is the model's; `busy_A_of_B`, that in so many of its runs a stage of a pipeline has a microbatch,
while the others are its bubble; `taken_A_of_B`, that so many of the runs, over all stages, take this branch.
"""

from __future__ import annotations

import re
from fractions import Fraction

# What JAX names itself: never a part of a model.
_OWN = frozenset((
    "while", "body", "cond", "scan", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation",
    "remat", "shard_map", "pjit", "custom_partitioning", "custom_jvp_call", "custom_vjp_call", "core_call",
    "custom_vjp_call_jaxpr", "xla_call", "fwd", "bwd", "microbatches",
))  # fmt: skip
_SHARE = re.compile(r"(needed|busy|taken)_(\d+)_of_(\d+)(?!\w)")
_BRANCH = re.compile(r"branch_\d+_fun$")
_CALL = re.compile(r"(?:p?jit)\(.*\)$")
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap|pmap|remat|checkpoint)\((.*)\)$")
_EINSUM = re.compile(r"[a-z.]+,.*->.*$")


def shares_of(scopes: str) -> dict[str, Fraction]:
    """What the scopes of a path say of its work, by `needed`, `busy` and `taken`.

    A scope may stand twice in the path, once from each side of a transform: it counts once.
    """
    return {kind: Fraction(int(a), int(b)) for kind, a, b in _SHARE.findall(scopes)}


def module_of(op_name: str) -> str:
    """The caller's scopes joined by "/", "" where there are none (or XLA named it).

    Where XLA merged several operations ("up/(a/add:b/mul)"), the scopes before the merged part.
    """
    if "/" not in op_name:
        return ""
    path = op_name.split("(", 1)[0] if op_name.startswith("(") else op_name
    scopes = [scope for part in _parts(path)[:-1] if (scope := _scope(part))]
    # A scope stands twice where a transformation begins inside it: "jvp(loss)/transpose(loss)".
    return "/".join(scope for place, scope in enumerate(scopes) if scopes[place - 1 : place] != [scope])


def _parts(path: str) -> list[str]:
    """Split at the slashes that stand in no parenthesis."""
    parts, depth, start = list[str](), 0, 0
    for place, sign in enumerate(path):
        depth += (sign == "(") - (sign == ")")
        if sign == "/" and not depth:
            parts.append(path[start:place])
            start = place + 1
    return [*parts, path[start:]]


def _scope(part: str) -> str:
    """The caller's own word in one part of a path, or "" where it is JAX's."""
    while match := _TRANSFORM.match(part):
        part = match[1]
    own = (
        part in _OWN or _SHARE.match(part) or _BRANCH.match(part) or _CALL.match(part) or _EINSUM.match(part)
    )
    return "" if own or part.startswith("(") else part
