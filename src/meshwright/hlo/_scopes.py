"""Find the training phase and the model module that an instruction belongs to, from its `op_name`.

Which part of a training step an instruction belongs to, by the path in its `op_name`.

JAX names what it traces: `jit(step)/jvp()/...` is forward, `transpose(jvp())` backward,
`rematted_computation` recomputation; a scope `optimizer` is the caller's own. XLA leaves some instructions
unnamed (its own copies, rewritten dots): they take the phase of their neighbours. Copies that its
rematerialisation pass makes are called `NAME.remat`, `.remat2`, ...: all but the first that is left of a
name are recomputation, for the pass may also have moved the only one.

Which part of the model an operation belongs to, and how much of it counts, by the path in its `op_name`.

JAX puts the caller's scopes (`jax.named_scope`, Flax modules) into that path, between what it names itself:
transformations (`jvp(layers)`), loops, calls and, last, the primitive. What is left of
"jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp_block/up/dot_general" is "layers/mlp_block/up".

Scopes of ours tell those who count what the program alone does not: `needed_A_of_B`, that A / B of the
arithmetic is the model's; `busy_A_of_B`, that in so many of its runs a stage of a pipeline has a microbatch,
while the others are its bubble; `taken_A_of_B`, that so many of the runs, over all stages, take this branch.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from ._text import Computation, Instruction, Program

PHASES = ("forward", "backward", "recompute", "optimizer", "other")
_OPTIMIZER = re.compile(r"(^|[/(])optimizer([/)]|$)")
_REPEAT = re.compile(r"\.remat\d*(\.\d+)?(?=\.|$)")
# A value is used by its own phase and by later ones, and made from its own and earlier ones.
_ORDER = ("forward", "recompute", "backward", "optimizer")


def has_path(instruction: Instruction) -> bool:
    """Whether JAX named it: an argument's path and a name of XLA's own ("multiply.3") have no slash."""
    return "/" in instruction.op_name


class Phases:
    """Answers `of` for one program."""

    def __init__(self, program: Program) -> None:
        names = {instruction.op_name for _, instruction in program.instructions()}
        differentiated = any("jvp(" in name or "transpose(" in name for name in names)
        self._otherwise = "other" if differentiated else "forward"
        self._repeats = _repeats(program)
        self._users: dict[str, dict[str, list[Instruction]]] = {}

    def repeats(self, instruction: Instruction) -> bool:
        """Whether XLA itself computes a value again here, because memory was short (its remat pass)."""
        return instruction.name in self._repeats

    def of(self, computation: Computation, instruction: Instruction) -> str:
        """The phase by the instruction's own name, else by its neighbours' in its computation."""
        if self.repeats(instruction):
            return "recompute"
        if has_path(instruction):
            return self._named(instruction.op_name)
        return self._inherited(computation, instruction)

    def users_of(self, computation: Computation, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions of the same computation that use it."""
        return tuple(self._users_in(computation).get(instruction.name, ()))

    def _named(self, op_name: str) -> str:
        if "rematted_computation" in op_name:
            return "recompute"
        if "transpose(" in op_name:
            return "backward"
        if "jvp(" in op_name:
            return "forward"
        return "optimizer" if _OPTIMIZER.search(op_name) else self._otherwise

    def _inherited(self, computation: Computation, instruction: Instruction) -> str:
        """The earliest phase that uses the value; where only the optimizer does, the latest it comes from."""
        users = self._reached(instruction, self._users_in(computation))
        for phase in _ORDER[:-1]:
            if phase in users:
                return phase
        made_from = {
            i.name: [computation.by_name[o.name] for o in i.operands] for i in computation.instructions
        }
        makers = self._reached(instruction, made_from)
        for phase in reversed(_ORDER[:-1]):
            if phase in makers:
                return phase
        return "optimizer" if "optimizer" in users else self._otherwise

    def _reached(self, start: Instruction, edges: dict[str, list[Instruction]]) -> set[str]:
        """Phases of the nearest named instructions along `edges`, through unnamed ones."""
        found: set[str] = set()
        seen = {start.name}
        queue = deque(edges.get(start.name, []))
        while queue:
            instruction = queue.popleft()
            if instruction.name in seen:
                continue
            seen.add(instruction.name)
            if has_path(instruction):
                found.add(self._named(instruction.op_name))
            else:
                queue.extend(edges.get(instruction.name, []))
        return found

    def _users_in(self, computation: Computation) -> dict[str, list[Instruction]]:
        if computation.name not in self._users:
            users: dict[str, list[Instruction]] = {}
            for instruction in computation.instructions:
                for operand in instruction.operands:
                    users.setdefault(operand.name, []).append(instruction)
            self._users[computation.name] = users
        return self._users[computation.name]


def _repeats(program: Program) -> set[str]:
    found: set[str] = set()
    for computation in program.computations.values():
        seen: set[str] = set()
        for instruction in computation.instructions:
            original = _REPEAT.sub("", instruction.name)
            if original != instruction.name and original in seen:
                found.add(instruction.name)
            seen.add(original)
    return found


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
