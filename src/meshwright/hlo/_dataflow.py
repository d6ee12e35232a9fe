"""Follow a value of an XLA program back towards the operation that computes it.

`Dataflow` knows how a value passes through each instruction: out of tuples, around loops, into and out of
fusions and other called computations, and through instructions that only move it. Three questions use the
walk, and differ in the instructions that they look through:
* `trail` leads to the operation that computes a value. Most bytes at the memory peak are loop state or
  stacked results, which XLA names after the loop; the trail leads from a stack to the value put into it.
* `argument_of` finds the program argument that a value is a copy of, if any. A parameter that is cast,
  gathered, sliced or given another layout is still that parameter.
* `maker` finds the operation behind casts, copies and fusions in the same loop.
"""

from __future__ import annotations

from collections.abc import Callable

from ._text import MOVING, Computation, Instruction, Operand, Program

Place = tuple[Computation, Instruction, tuple[int, ...]]
"""A value: an instruction, its computation, and the index in the instruction's tuple (() for all of it)."""

_ENTERED = ("fusion", "call", "async-start")
_HANDED_ON = ("get-tuple-element", "tuple", "while", "parameter")
_ARGUMENT_KEPT = frozenset((
    *MOVING, *_HANDED_ON, *_ENTERED, "slice", "dynamic-slice", "pad", "all-gather", "all-gather-start",
    "async-update", "reduce-precision",
))  # fmt: skip
_MADE_ELSEWHERE = MOVING | {"broadcast", "all-reduce-done", "collective-permute-done"}


class Dataflow:
    """Find where the values of one program come from."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._home = {i.name: (computation, i) for computation, i in program.instructions()}
        self._callers = {  # by the name of a called computation: the caller, and the computation around it
            name: (computation, i)
            for computation, i in program.instructions()
            if i.opcode in (*_ENTERED, "while")
            for name in i.all_called
        }

    def place_of(self, name: str) -> tuple[Computation, Instruction] | None:
        """Return an instruction and the computation that contains it; None for an unknown name."""
        return self._home.get(name)

    def trail(self, name: str, index: str) -> list[Place]:
        """Return the steps from a value back to the operation that computes it, the value first.

        The value is element `index` ("{2}") of the result of instruction `name`. The list is empty for an
        unknown name.
        """
        if name not in self._home:
            return []
        numbers = tuple(int(n) for n in index.strip("{}").split(",") if n)
        return self._follow((*self._home[name], numbers), self._is_looked_through)

    def argument_of(self, place: Place) -> int | None:
        """Return the number of the program argument that a value is a copy of, or None."""
        home, instruction, _ = self._follow(place, lambda place: place[1].opcode in _ARGUMENT_KEPT)[-1]
        is_argument = instruction.opcode == "parameter" and home is self._program.entry
        return int(instruction.literal) if is_argument else None

    def maker(self, home: Computation, value: Instruction) -> Instruction:
        """Return the instruction that computes a value, looking through data movement and fusions."""
        through = (*_MADE_ELSEWHERE, "fusion", "parameter")
        return self._follow((home, value, ()), lambda place: place[1].opcode in through)[-1][1]

    def _follow(self, start: Place, through: Callable[[Place], bool]) -> list[Place]:
        """Return the places from `start` back to the first that is not looked through, or that repeats."""
        place: Place | None = start
        places: list[Place] = []
        seen: set[tuple[str, tuple[int, ...]]] = set()
        while place is not None and (place[1].name, place[2]) not in seen:
            seen.add((place[1].name, place[2]))
            places.append(place)
            place = self._before(*place) if through(place) else None
        return places

    def _is_looked_through(self, place: Place) -> bool:
        """Return whether `trail` leads past this instruction, because another one computes its value."""
        instruction = place[1]
        if instruction.opcode in _HANDED_ON or instruction.opcode == "dynamic-update-slice":
            return True
        if instruction.opcode == "fusion":
            before = self._before(*place)
            named = before is not None and (before[1].op_name or before[1].opcode in _MADE_ELSEWHERE)
            return bool(named) and not instruction.op_name.endswith("dot_general")
        stacking = not instruction.op_name or "dynamic_update" in instruction.op_name
        return stacking and instruction.opcode in _MADE_ELSEWHERE

    def _before(self, home: Computation, instruction: Instruction, index: tuple[int, ...]) -> Place | None:
        """Return the place that an instruction takes its value from; None where it takes none."""
        opcode = instruction.opcode
        if opcode == "parameter":
            return self._outside(home, instruction, index)
        if opcode == "while":
            body = self._program.computations[instruction.called["body"][0]]
            return body, body.root, index
        if opcode in _ENTERED and instruction.called:
            # The result of an asynchronous computation is element 1 of the tuple of its start.
            inner = index[1:] if opcode == "async-start" else index
            return _result(self._program.called_by(instruction)[0], inner)
        if opcode in _ENTERED or not instruction.operands or (opcode == "tuple" and not index):
            return None
        number, inner = _operand_behind(instruction, index)
        return _of_operand(home, instruction.operands[number], inner)

    def _outside(self, home: Computation, parameter: Instruction, index: tuple[int, ...]) -> Place | None:
        """Return the value behind a parameter: what the caller passes, or what a loop's rounds hand on."""
        if home.name not in self._callers:
            return None
        outside, caller = self._callers[home.name]
        if caller.opcode != "while":
            return _of_operand(outside, caller.operands[int(parameter.literal)], index)
        if not index:
            return None
        body = self._program.computations[caller.called["body"][0]]
        following = _result(body, index)
        if self._is_unchanged(body, following, index):
            return _of_operand(outside, caller.operands[0], index)
        return following

    def _is_unchanged(self, body: Computation, place: Place, index: tuple[int, ...]) -> bool:
        """Return whether the value that a loop's body returns at `index` is the one it was given there."""
        _, instruction, inner = place
        if instruction.opcode == "get-tuple-element":
            given = instruction.operands[0]
            instruction = body.by_name[given.name]
            inner = (*given.index, int(place[1].attributes["index"]), *inner)
        return instruction.opcode == "parameter" and inner == index


def _operand_behind(instruction: Instruction, index: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the number of the operand behind element `index` of a result, and the index in that operand."""
    match instruction.opcode:
        case "tuple":
            return index[0], index[1:]
        case "get-tuple-element":
            return 0, (int(instruction.attributes["index"]), *index)
        case "dynamic-update-slice":
            return 1, ()
        case "all-gather-start":  # ((inputs), (outputs)); (input, output) for a single array
            return index[1] if len(index) > 1 else 0, ()
        case "all-gather-done" | "async-done":  # a start's results are element 1 of its tuple
            return 0, (1, *index)
        case "copy-done":
            return 0, (0,)
        case "copy-start":
            return 0, ()
        case _:
            return 0, index


def _result(computation: Computation, index: tuple[int, ...]) -> Place:
    """Return the value at `index` of a computation's result, out of the tuple at its root."""
    root = computation.root
    if root.opcode == "tuple" and index:
        return _of_operand(computation, root.operands[index[0]], index[1:])
    return computation, root, index


def _of_operand(home: Computation, operand: Operand, index: tuple[int, ...]) -> Place:
    return home, home.by_name[operand.name], (*operand.index, *index)
