"""Find the trip count of a `while`: from the compiler's annotation, else by following its counter.

XLA's GPU and CPU backends annotate most loops with `known_trip_count`, and its TPU backend none. Loop
pipelining on GPUs drops the annotation from a loop whose first round it peels off.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from ._text import Computation, Instruction, Operand, Program

# Following the counter of a loop with this many rounds would take too long: its trip count stays unknown.
MOST_ROUNDS = 100_000

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
# (parameter number, index in its tuple) -> the integer at that place; None where it is unknown.
_Reader = Callable[[int, tuple[int, ...]], int | None]


def trips_of(program: Program, home: Computation, loop: Instruction) -> int | None:
    """Return the trip count of `loop` in computation `home`; None where it is unknown.

    Counted: annotated loops, and loops whose condition depends only on integers of the loop state that start
    at constants and change by integer arithmetic. `jax.lax.scan` and `fori_loop` with fixed bounds make such
    loops. Not counted: loops that depend on data, and unannotated loops of `MOST_ROUNDS` rounds or more.
    """
    if loop.trip_count is not None:
        return loop.trip_count
    condition, body = (program.computations[loop.called[key][0]] for key in ("condition", "body"))
    state: dict[int, int | None] = {}

    def start(place: int) -> int | None:
        entering = Operand(name=loop.operands[0].name, index=(*loop.operands[0].index, place))
        return _value(program, home, entering, lambda number, index: None)

    def read(number: int, index: tuple[int, ...]) -> int | None:
        if not index:
            return None
        if index[0] not in state:
            state[index[0]] = start(index[0])
        return state[index[0]]

    for rounds in range(MOST_ROUNDS):
        goes_on = _value(program, condition, Operand(name=condition.root.name), read)
        if goes_on is None:
            return None
        if not goes_on:
            return rounds
        following = {
            p: _value(program, body, Operand(name=body.root.name, index=(p,)), read) for p in [*state]
        }
        # A state element that was first read just now is missing from `following`: give up.
        if len(state) != len(following):
            return None
        state.update(following)
    return None


def _value(program: Program, computation: Computation, operand: Operand, read: _Reader) -> int | None:
    """Return the integer that an operand holds, if constants and `read` determine it; else None."""
    instruction, index = computation.by_name[operand.name], operand.index

    def argument(number: int, inner: tuple[int, ...] = ()) -> int | None:
        used = instruction.operands[number]
        return _value(program, computation, Operand(name=used.name, index=(*used.index, *inner)), read)

    opcode = instruction.opcode
    if opcode == "parameter":
        return read(int(instruction.literal), index)
    if opcode == "constant":
        return _integer(instruction.literal)
    if opcode == "get-tuple-element":
        return argument(0, (int(instruction.attributes["index"]), *index))
    if opcode == "tuple" and index:
        return argument(index[0], index[1:])
    if opcode in ("copy", "bitcast", "reshape"):
        return argument(0, index)
    if opcode in ("fusion", "call"):
        called = program.computations[instruction.all_called[0]]
        return _value(program, called, Operand(name=called.root.name, index=index), argument)
    table = _COMPARE if opcode == "compare" else _ARITHMETIC
    rule = table.get(instruction.attributes["direction"] if opcode == "compare" else opcode)
    if rule is None:
        return None
    left, right = argument(0), argument(1)
    return None if left is None or right is None else int(rule(left, right))


def _integer(literal: str) -> int | None:
    if literal in ("true", "false"):
        return int(literal == "true")
    return int(literal) if literal.lstrip("-").isdigit() else None
