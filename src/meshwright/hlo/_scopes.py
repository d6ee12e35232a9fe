"""Find the training phase and the model module of an instruction from the path in its `op_name`.

Phase: JAX names what it traces. `jit(step)/jvp()/...` is forward, `transpose(jvp())` backward, and
`rematted_computation` recomputation. The caller sets the scope `optimizer`. XLA leaves some instructions
unnamed (its own copies, rewritten dots); they take the phase of their neighbours. XLA's rematerialisation
pass names its copies `NAME.remat`, `.remat2`, ... The first instruction of a NAME is not recomputation even
with such a suffix, because the pass may have moved the only one.

Module: JAX puts the caller's scopes (`jax.named_scope`, Flax modules) into the path, between names of its
own: transformations (`jvp(layers)`), loops, calls and, last, the primitive. The module of
"jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp_block/up/dot_general" is "layers/mlp_block/up".

Share: some of Meshwright's scopes declare facts that the program alone does not show. `needed_A_of_B`: A / B
of the arithmetic is the model's. `busy_A_of_B`: a pipeline stage has a microbatch in A of its B runs; the
other runs are its bubble. `taken_A_of_B`: A of B runs, over all stages, take this branch.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction

from ._text import Computation, Instruction, Program

PHASES = ("forward", "backward", "recompute", "optimizer", "other")
_OPTIMIZER = re.compile(r"(^|[/(])optimizer([/)]|$)")
_REPEAT = re.compile(r"\.remat\d*(\.\d+)?(?=\.|$)")
# A value is used by its own phase and by later ones, and computed from values of its own and earlier ones.
_ORDER = ("forward", "recompute", "backward", "optimizer")


def phase_of(path: str, otherwise: str = "other") -> str:
    """Return the phase of an operation from the path of scopes and transformations that it was traced under.

    `otherwise`: the phase of a path that shows none.

    >>> phase_of("jit(step)/transpose(jvp(layers))/mlp/dot_general")
    'backward'
    """
    if "rematted_computation" in path:
        return "recompute"
    if "transpose(" in path:
        return "backward"
    if "jvp(" in path:
        return "forward"
    return "optimizer" if _OPTIMIZER.search(path) else otherwise


class ProgramPhases:
    """Find the phases of the instructions of one program."""

    def __init__(self, program: Program) -> None:
        names = {instruction.op_name for _, instruction in program.instructions()}
        differentiated = any("jvp(" in name or "transpose(" in name for name in names)
        self._otherwise = "other" if differentiated else "forward"
        self._repeated = {name for c in program.computations.values() for name in _repeated_in(c)}

    def is_repeated(self, instruction: Instruction) -> bool:
        """Return whether XLA's rematerialisation pass computes a value again here to save memory."""
        return instruction.name in self._repeated

    def of(self, computation: Computation, instruction: Instruction) -> str:
        """Return the phase from the instruction's own name, else from its neighbours in its computation.

        A value that XLA left unnamed has the earliest phase that uses it. If only the optimizer uses it, it
        has the latest phase that it is computed from.
        """
        if self.is_repeated(instruction):
            return "recompute"
        if instruction.has_path:
            return phase_of(instruction.op_name, self._otherwise)
        users = self._reached(instruction, lambda i: computation.users[i.name])
        for phase in _ORDER[:-1]:
            if phase in users:
                return phase
        makers = self._reached(instruction, lambda i: [computation.by_name[o.name] for o in i.operands])
        for phase in reversed(_ORDER[:-1]):
            if phase in makers:
                return phase
        return "optimizer" if "optimizer" in users else self._otherwise

    def _reached(self, start: Instruction, next_to: Callable[[Instruction], list[Instruction]]) -> set[str]:
        """Return the phases of the nearest named instructions, passing through unnamed ones."""
        phases: set[str] = set()
        seen = {start.name}
        queue = deque(next_to(start))
        while queue:
            instruction = queue.popleft()
            if instruction.name in seen:
                continue
            seen.add(instruction.name)
            if instruction.has_path:
                phases.add(phase_of(instruction.op_name, self._otherwise))
            else:
                queue.extend(next_to(instruction))
        return phases


def _repeated_in(computation: Computation) -> Iterator[str]:
    seen: set[str] = set()
    for instruction in computation.instructions:
        original = _REPEAT.sub("", instruction.name)
        if original != instruction.name and original in seen:
            yield instruction.name
        seen.add(original)


# Names that JAX adds itself, and the scope of Meshwright's accumulation loop: never part of a model.
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
    """Return the shares that the scopes of a path declare, by `needed`, `busy` and `taken`.

    A scope may appear twice in the path, once from each side of a transformation. It counts once.

    >>> shares_of("jit(step)/needed_5_of_8/dot_general")
    {'needed': Fraction(5, 8)}
    """
    return {kind: Fraction(int(a), int(b)) for kind, a, b in _SHARE.findall(scopes)}


def module_of(op_name: str) -> str:
    """Return the caller's scopes joined by "/", or "" where there are none or XLA named the instruction.

    Where XLA merged several operations ("up/(a/add:b/mul)"), return the scopes before the merged part.

    >>> module_of("jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp_block/up/dot_general")
    'layers/mlp_block/up'
    """
    if "/" not in op_name:
        return ""
    path = op_name.split("(", 1)[0] if op_name.startswith("(") else op_name
    scopes = [scope for part in _parts(path)[:-1] if (scope := _scope(part))]
    # A scope appears twice where a transformation begins inside it: "jvp(loss)/transpose(loss)".
    return "/".join(scope for scope, _ in itertools.groupby(scopes))


def _parts(path: str) -> list[str]:
    """Split a path at the slashes outside parentheses."""
    parts, depth, start = list[str](), 0, 0
    for place, sign in enumerate(path):
        depth += (sign == "(") - (sign == ")")
        if sign == "/" and not depth:
            parts.append(path[start:place])
            start = place + 1
    return [*parts, path[start:]]


def _scope(part: str) -> str:
    """Return the caller's scope in one part of a path, or "" where the part is not the caller's."""
    while match := _TRANSFORM.match(part):
        part = match[1]
    own = (
        part in _OWN or _SHARE.match(part) or _BRANCH.match(part) or _CALL.match(part) or _EINSUM.match(part)
    )
    return "" if own or part.startswith("(") else part
