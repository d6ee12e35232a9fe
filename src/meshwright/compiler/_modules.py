"""Which part of the model an operation belongs to, by the path in its `op_name`.

JAX puts the caller's scopes (`jax.named_scope`, Flax modules) into that path, between what it names itself:
transformations (`jvp(layers)`), loops, calls and, last, the primitive. What is left of
"jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp_block/up/dot_general" is "layers/mlp_block/up".
"""

from __future__ import annotations

import re

# What JAX names itself: never a part of a model.
_OWN = frozenset((
    "while", "body", "cond", "scan", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation",
    "remat", "shard_map", "pjit", "custom_partitioning", "custom_jvp_call", "custom_vjp_call", "core_call",
    "custom_vjp_call_jaxpr", "xla_call", "fwd", "bwd", "microbatches",
))  # fmt: skip
_NEEDED = re.compile(r"needed_\d+_of_\d+$")
_BRANCH = re.compile(r"branch_\d+_fun$")
_CALL = re.compile(r"(?:p?jit)\(.*\)$")
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap|pmap|remat|checkpoint)\((.*)\)$")
_EINSUM = re.compile(r"[a-z.]+,.*->.*$")


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
        part in _OWN or _NEEDED.match(part) or _BRANCH.match(part) or _CALL.match(part) or _EINSUM.match(part)
    )
    return "" if own or part.startswith("(") else part
