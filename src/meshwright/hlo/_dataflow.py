"""Follow values through an XLA program: to the user's operation and to the program's arguments.

Where a value in memory comes from in the user's program: an `op_name` path and a source line.

Most bytes at the peak are loop state or stacked results, which XLA names after the loop. The walk steps
from there to what makes them: out of tuples, into the loop's body, through copies, and from an update of a
stack to the update.

Which argument of the program a value is a copy of, if it is one.

A parameter that is cast, gathered, sliced or laid out anew is still that parameter. The walk steps from a
value to its operand as long as data is only moved: into fusions and asynchronous computations, out of tuples,
through loop state that a loop's body hands on unchanged.
"""

from __future__ import annotations

from ._text import Computation, Instruction, Operand, Program

MOVING = frozenset((
    "bitcast", "copy", "convert", "reshape", "transpose", "broadcast", "opt-barrier", "copy-start",
    "copy-done", "async-done", "all-gather-done", "all-reduce-done", "collective-permute-done",
))  # fmt: skip
Place = tuple[Computation, Instruction, tuple[int, ...]]


class Origins:
    """Answers for one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._home = {i.name: (computation, i) for computation, i in program.instructions()}
        self._fusions = {
            i.all_called[0]: (computation, i)
            for computation, i in program.instructions()
            if i.opcode == "fusion"
        }
        self._loops = {  # a loop's body or condition: the loop and its home
            name: (computation, i)
            for computation, i in program.instructions()
            if i.opcode == "while"
            for name in i.all_called
        }

    def of(self, name: str, index: str) -> tuple[str, str]:
        """The path and "file.py:line" of value `index` ("{2}") of instruction `name`; "" where unknown."""
        named = [instruction for _, instruction, _ in self.trail(name, index) if instruction.op_name]
        return (named[-1].op_name, self.line_of(named[-1])) if named else ("", "")

    def trail(self, name: str, index: str) -> list[Place]:
        """The steps from a value towards what makes it, the value first; none for an unknown name."""
        if name not in self._home:
            return []
        numbers = tuple(int(n) for n in index.strip("{}").split(",") if n)
        place: Place | None = (*self._home[name], numbers)
        found: list[Place] = []
        seen: set[tuple[str, tuple[int, ...]]] = set()
        while place is not None and (place[1].name, place[2]) not in seen:
            seen.add((place[1].name, place[2]))
            found.append(place)
            place = self._step(*place)
        return found

    def place_of(self, name: str) -> tuple[Computation, Instruction] | None:
        """An instruction and the computation it stands in; None for an unknown name."""
        return self._home.get(name)

    def line_of(self, instruction: Instruction) -> str:
        """ "model.py:25", or "" where the compiler does not know."""
        return self._program.source_line(instruction)

    def _step(self, home: Computation, instruction: Instruction, index: tuple[int, ...]) -> Place | None:
        """One step towards what makes the value; None where `instruction` makes it."""
        opcode = instruction.opcode
        if opcode == "get-tuple-element":
            return self._operand(
                home, instruction.operands[0], (int(instruction.attributes["index"]), *index)
            )
        if opcode == "tuple" and index:
            return self._operand(home, instruction.operands[index[0]], index[1:])
        if opcode == "while":
            body = self._program.computations[instruction.called["body"][0]]
            return self._operand(body, Operand(name=body.root.name), index)
        if opcode == "parameter" and home.name in self._loops and index:
            return self._around(home, instruction, index)
        if opcode == "parameter" and home.name in self._fusions:
            outside, fusion = self._fusions[home.name]
            return self._operand(outside, fusion.operands[int(instruction.literal)], index)
        if opcode == "fusion" and not instruction.op_name.endswith("dot_general"):
            called = self._program.computations[instruction.all_called[0]]
            root = called.root
            if root.opcode == "tuple" and index:
                root = called.by_name[root.operands[index[0]].name]
            return (called, root, ()) if root.op_name or root.opcode in MOVING else None
        if opcode == "dynamic-update-slice":
            return self._operand(home, instruction.operands[1], ())
        stacking = not instruction.op_name or "dynamic_update" in instruction.op_name
        if stacking and opcode in MOVING and instruction.operands:
            return self._operand(home, instruction.operands[0], ())
        return None

    def _around(self, body: Computation, parameter: Instruction, index: tuple[int, ...]) -> Place | None:
        """From a loop's parameter to what the body hands to the next round, or to the loop's input."""
        computation, loop = self._loops[body.name]
        if body.root.opcode == "tuple":
            handed = body.root.operands[index[0]]
            maker = body.by_name[handed.name]
            passed = maker.opcode == "get-tuple-element" and maker.operands[0].name == parameter.name
            if not passed and handed.name != parameter.name:
                return self._operand(body, handed, index[1:])
        return self._operand(computation, loop.operands[0], index)

    def _operand(self, home: Computation, operand: Operand, index: tuple[int, ...]) -> Place:
        return home, home.by_name[operand.name], (*operand.index, *index)


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
