"""How often a `while` runs: as the compiler wrote it, else as its counter shows.

XLA's GPU and CPU backends write `known_trip_count` beside a loop; its TPU backend does not.
"""

from __future__ import annotations

from .hlo import Computation, Instruction, Operand, Program


def trips_of(program: Program, home: Computation, loop: Instruction) -> int | None:
    """The trip count of `loop`, which stands in `home`; None where it is not a counted loop.

    Counted: the condition is counter < constant, the counter starts at a constant and the body adds a
    constant to it: what `jax.lax.scan` and `fori_loop` with fixed bounds make.
    """
    if loop.trip_count is not None:
        return loop.trip_count
    condition, body = (program.computations[loop.called[key][0]] for key in ("condition", "body"))
    test = condition.root
    if test.opcode != "compare" or test.attributes.get("direction") != "LT" or body.root.opcode != "tuple":
        return None
    place = _tuple_index(condition, test.operands[0])
    limit = _constant(condition, test.operands[1])
    state = home.by_name[loop.operands[0].name]
    if place is None or limit is None or state.opcode != "tuple":
        return None
    start = _constant(home, state.operands[place])
    following = _source(body, body.root.operands[place])
    if start is None or following.opcode != "add" or _tuple_index(body, following.operands[0]) != place:
        return None
    step = _constant(body, following.operands[1])
    return -((start - limit) // step) if step and step > 0 and limit > start else None


def _source(computation: Computation, operand: Operand) -> Instruction:
    """What makes the value, copies stepped over."""
    instruction = computation.by_name[operand.name]
    while instruction.opcode in ("copy", "bitcast"):
        instruction = computation.by_name[instruction.operands[0].name]
    return instruction


def _constant(computation: Computation, operand: Operand) -> int | None:
    instruction = _source(computation, operand)
    is_integer = instruction.opcode == "constant" and instruction.literal.lstrip("-").isdigit()
    return int(instruction.literal) if is_integer else None


def _tuple_index(computation: Computation, operand: Operand) -> int | None:
    """Which element of the loop's state the value is."""
    if operand.index:
        return operand.index[0]
    instruction = _source(computation, operand)
    if instruction.opcode != "get-tuple-element":
        return None
    source = computation.by_name[instruction.operands[0].name]
    return int(instruction.attributes["index"]) if source.opcode == "parameter" else None
