"""Trace values of an XLA program back to the operation that computes them and to the program's arguments.

`Origins` finds the `op_name` path and the source line of the operation that computes a value. Most bytes at
the memory peak are loop state or stacked results, which XLA names after the loop. `Origins` therefore steps
out of tuples, into loop bodies, through copies, and from an update of a stack to the value put into it.

`Sources` finds the program argument that a value is a copy of, if any. A parameter that is cast, gathered,
sliced or given another layout is still that parameter. `Sources` steps to the operand while data only moves:
into fusions and asynchronous computations, out of tuples, and through loop state that stays unchanged.
"""

from __future__ import annotations

from ._text import Computation, Instruction, Operand, Program

MOVING = frozenset((
    "bitcast", "copy", "convert", "reshape", "transpose", "broadcast", "opt-barrier", "copy-start",
    "copy-done", "async-done", "all-gather-done", "all-reduce-done", "collective-permute-done",
))  # fmt: skip
Place = tuple[Computation, Instruction, tuple[int, ...]]


class Origins:
    """Find the operations that compute the values of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._home = {i.name: (computation, i) for computation, i in program.instructions()}
        self._fusions = {
            i.all_called[0]: (computation, i)
            for computation, i in program.instructions()
            if i.opcode == "fusion"
        }
        self._loops = {  # name of a loop's body or condition -> the loop, and the computation around it
            name: (computation, i)
            for computation, i in program.instructions()
            if i.opcode == "while"
            for name in i.all_called
        }

    def of(self, name: str, index: str) -> tuple[str, str]:
        """Return the `op_name` path and "file.py:line" of a value, each "" where unknown.

        The value is element `index` ("{2}") of the result of instruction `name`.
        """
        named = [instruction for _, instruction, _ in self.trail(name, index) if instruction.op_name]
        return (named[-1].op_name, self.line_of(named[-1])) if named else ("", "")

    def trail(self, name: str, index: str) -> list[Place]:
        """Return the steps from a value back to the operation that computes it, the value first.

        The list is empty for an unknown name.
        """
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
        """Return an instruction and the computation that contains it; None for an unknown name."""
        return self._home.get(name)

    def line_of(self, instruction: Instruction) -> str:
        """Return the source line ("model.py:25"), or "" where the compiler does not know it."""
        return self._program.source_line(instruction)

    def _step(self, home: Computation, instruction: Instruction, index: tuple[int, ...]) -> Place | None:
        """Step once towards the operation that computes the value; None if `instruction` computes it."""
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
            return self._around(home, index)
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

    def _around(self, home: Computation, index: tuple[int, ...]) -> Place | None:
        """Step from the parameter of a loop's body or condition to the body's value for the next round.

        Step to the loop's input where the body passes the value on.
        """
        computation, loop = self._loops[home.name]
        body = self._program.computations[loop.called["body"][0]]
        if body.root.opcode == "tuple":
            handed, state = body.root.operands[index[0]], body.parameters[0].name
            maker = body.by_name[handed.name]
            passed = maker.opcode == "get-tuple-element" and maker.operands[0].name == state
            if not passed and handed.name != state:
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
    """Find the program arguments that the values of one program are copies of."""

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
        """Return the number of the program argument that a value is a copy of, or None.

        The value is element `index` of the result of `instruction`.
        """
        key = (home.name, instruction.name, index)
        if key not in self._known:
            self._known[key] = None  # a value that depends on itself around a loop is not an argument
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
            # The result of an asynchronous computation is element 1 of the tuple of its start.
            return self.argument_of(called, called.root, index[1:] if opcode == "async-start" else index)
        if opcode == "all-gather-start":  # ((inputs), (outputs)); (input, output) for a single array
            place = index[1] if len(index) > 1 else 0
            return self._operand(home, instruction.operands[place], ())
        if opcode in MOVES_FIRST_OPERAND:
            return self._operand(home, instruction.operands[0], _index_before(instruction, index))
        return None

    def _of_parameter(self, home: Computation, number: int, index: tuple[int, ...]) -> int | None:
        """Find the argument behind a computation's parameter, through the value that its caller passes."""
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
        """Return whether a loop's body passes element `place` of its state on unchanged."""
        state, maker = body.parameters[0].name, body.by_name[handed.name]
        if maker.opcode == "get-tuple-element":
            return maker.operands[0].name == state and int(maker.attributes["index"]) == place
        return handed.name == state and handed.index == (place,)

    def _operand(self, home: Computation, operand: Operand, index: tuple[int, ...]) -> int | None:
        return self.argument_of(home, home.by_name[operand.name], (*operand.index, *index))


def _index_before(instruction: Instruction, index: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index in the operand that corresponds to `index` in the result.

    A start returns a tuple. The results of an all-gather and of an asynchronous computation are element 1 of
    it; the result of a copy is element 0.
    """
    if instruction.opcode in ("all-gather-done", "async-done"):
        return (1, *index)
    if instruction.opcode == "copy-done":
        return (0,)
    return () if instruction.opcode == "copy-start" else index
