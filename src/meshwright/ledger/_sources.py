"""Which argument of the program a value is a copy of, if it is one.

A parameter that is cast, gathered, sliced or laid out anew is still that parameter. The walk steps from a
value to its operand as long as data is only moved: into fusions and asynchronous computations, out of tuples,
through loop state that a loop's body hands on unchanged.
"""

from __future__ import annotations

from .hlo import Computation, Instruction, Operand, Program

MOVES_FIRST_OPERAND = frozenset((
    "bitcast", "copy", "convert", "reshape", "transpose", "opt-barrier", "slice", "dynamic-slice", "pad",
    "all-gather", "copy-start", "copy-done", "all-gather-done", "async-done", "async-update",
    "get-tuple-element", "reduce-precision",
))  # fmt: skip
INLINED = ("fusion", "call", "async-start")
_Key = tuple[str, str, tuple[int, ...]]


class Sources:
    """Answers `argument_of` for one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._callers: dict[str, tuple[Computation, Instruction]] = {}
        self._loops: dict[str, tuple[Computation, Instruction]] = {}
        for computation, instruction in program.instructions():
            if instruction.opcode in INLINED and instruction.all_called:
                self._callers[instruction.all_called[0]] = (computation, instruction)
            if instruction.opcode == "while":
                self._loops.update((name, (computation, instruction)) for name in instruction.all_called)
        self._known: dict[_Key, int | None] = {}

    def argument_of(self, home: Computation, instruction: Instruction, index: tuple[int, ...]) -> int | None:
        """The number of the program's argument that value `index` of `instruction` only moves, or None."""
        key = (home.name, instruction.name, index)
        if key not in self._known:
            self._known[key] = None  # a value that is made of itself, round a loop, is no argument
            self._known[key] = self._argument_of(home, instruction, index)
        return self._known[key]

    def _argument_of(self, home: Computation, instruction: Instruction, index: tuple[int, ...]) -> int | None:
        opcode = instruction.opcode
        if opcode == "parameter":
            return self._of_parameter(home, int(instruction.literal), index)
        if opcode == "get-tuple-element":
            return self._operand(
                home, instruction.operands[0], (int(instruction.attributes["index"]), *index)
            )
        if opcode == "tuple":
            return self._operand(home, instruction.operands[index[0]], index[1:]) if index else None
        if opcode == "while":
            body = self._program.computations[instruction.called["body"][0]]
            return self.argument_of(body, body.root, index)
        if opcode in INLINED and instruction.all_called:
            called = self._program.computations[instruction.all_called[0]]
            # What an asynchronous computation gives is element 1 of what starts it.
            return self.argument_of(called, called.root, index[1:] if opcode == "async-start" else index)
        if opcode == "all-gather-start":  # ((inputs), (outputs)), or (input, output) of a single one
            place = index[1] if len(index) > 1 else 0
            return self._operand(home, instruction.operands[place], ())
        if opcode in MOVES_FIRST_OPERAND:
            return self._operand(home, instruction.operands[0], _index_before(instruction, index))
        return None

    def _of_parameter(self, home: Computation, number: int, index: tuple[int, ...]) -> int | None:
        """A computation's parameter is what its caller gives it."""
        if home.name == self._program.entry.name:
            return number
        if home.name in self._callers:
            outside, caller = self._callers[home.name]
            return self._operand(outside, caller.operands[number], index)
        if home.name not in self._loops or not index:
            return None
        outside, loop = self._loops[home.name]
        body = self._program.computations[loop.called["body"][0]]
        if body.root.opcode != "tuple":
            return None
        handed = body.root.operands[index[0]]
        if self._hands_on(body, handed, index[0]):
            return self._operand(outside, loop.operands[0], index)
        return self._operand(body, handed, index[1:])

    def _hands_on(self, body: Computation, handed: Operand, place: int) -> bool:
        """Whether a loop's body gives the next round what it was given itself at this place."""
        state, maker = body.parameters[0].name, body.by_name[handed.name]
        if maker.opcode == "get-tuple-element":
            return maker.operands[0].name == state and int(maker.attributes["index"]) == place
        return handed.name == state and handed.index == (place,)

    def _operand(self, home: Computation, operand: Operand, index: tuple[int, ...]) -> int | None:
        return self.argument_of(home, home.by_name[operand.name], (*operand.index, *index))


def _index_before(instruction: Instruction, index: tuple[int, ...]) -> tuple[int, ...]:
    """The place in the operand's tuple: what is done is the second element of what was started."""
    if instruction.opcode in ("all-gather-done", "async-done"):
        return (1, *index)
    if instruction.opcode == "copy-done":
        return (0,)
    return () if instruction.opcode == "copy-start" else index
