"""Walk an XLA program: list what one device executes in a step, and follow a value back to its origin.

`Executions` lists the instructions that one device executes, and how often each runs. `ledger` counts FLOPs
and messages over this list. `predict` uses its trip counts and branches, so that both describe the same
execution. A loop's body runs as often as `trips_of` finds, or once where that is unknown. XLA's GPU and CPU
backends annotate most loops with `known_trip_count`, and its TPU backend none. Loop pipelining on GPUs drops
the annotation from a loop whose first round it peels off. Only the branch with the most work is listed of a
conditional; the caller defines what work is. Instructions inside a fusion, a call or an asynchronous
computation are listed too, after their caller. The scalar computation of a reduction, a sort or a scatter is
not entered.

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

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ._annotations import expected_trips
from ._text import MOVING, RUNNING, Computation, Instruction, Operand, Program

Weight = tuple[int, ...]
Weigher = Callable[[Program, Computation, Instruction], Weight]
"""Return the work of one run of an instruction, the most important number first; without what it calls."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Execution:
    """One instruction as a step executes it.

    `times`: runs on one device in one step. `in_loop`: whether a `while` contains it. `caller`: the fusion,
    call or asynchronous start that contains it; None for an instruction of the schedule itself.
    """

    computation: Computation
    instruction: Instruction
    times: int
    in_loop: bool
    caller: Execution | None


class Executions:
    """The executions of one program; iterating yields them in schedule order.

    Args:
        program: the optimised program.
        weigh: returns the work of one instruction. A conditional runs the branch with the most work.

    >>> text = '''HloModule one, is_scheduled=true
    ...
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %y = f32[4]{0} negate(%x)
    ... }
    ... '''
    >>> from meshwright.hlo import parse_program
    >>> executions = Executions(parse_program(text), lambda program, computation, instruction: (0,))
    >>> [(execution.instruction.opcode, execution.times) for execution in executions]
    [('parameter', 1), ('negate', 1)]
    """

    def __init__(self, program: Program, weigh: Weigher) -> None:
        self.program = program
        self._weigh = weigh
        self._trips: dict[str, int | None] = {}
        self._branches: dict[str, int] = {}
        self._work: dict[str, Weight] = {}
        self._all: tuple[Execution, ...] | None = None

    def __iter__(self) -> Iterator[Execution]:
        if self._all is None:
            self._all = tuple(self.within(self.program.entry))
        return iter(self._all)

    def within(self, computation: Computation, times: int = 1) -> Iterator[Execution]:
        """Yield the executions of `times` runs of a computation, including those of what it calls."""
        yield from self._run(computation, times, False, None)

    def trips(self, home: Computation, loop: Instruction) -> int | None:
        """Return the trip count of a `while` in computation `home`; None where it is unknown."""
        if loop.name not in self._trips:
            self._trips[loop.name] = trips_of(self.program, home, loop)
        return self._trips[loop.name]

    def branches(self, conditional: Instruction) -> tuple[Computation, ...]:
        """Return the branches of a conditional, in the order in which the conditional names them."""
        return self.program.called_by(conditional)

    def branch(self, conditional: Instruction) -> int:
        """Return the index in `branches` of the branch with the most work; of equals, the first."""
        if conditional.name not in self._branches:
            work = [self._work_of(branch) for branch in self.branches(conditional)]
            self._branches[conditional.name] = work.index(max(work))
        return self._branches[conditional.name]

    def _work_of(self, computation: Computation) -> Weight:
        if computation.name not in self._work:
            total: Weight = ()
            for run in self.within(computation):
                one = self._weigh(self.program, run.computation, run.instruction)
                total = tuple(a + run.times * b for a, b in zip(total or (0,) * len(one), one, strict=True))
            self._work[computation.name] = total
        return self._work[computation.name]

    def _run(
        self, computation: Computation, times: int, in_loop: bool, caller: Execution | None
    ) -> Iterator[Execution]:
        for instruction in computation.instructions:
            execution = Execution(
                computation=computation, instruction=instruction, times=times, in_loop=in_loop, caller=caller
            )
            yield execution
            if instruction.opcode == "while":
                trips = self.trips(computation, instruction)
                for role, runs in (("body", trips), ("condition", None if trips is None else trips + 1)):
                    if runs == 0:
                        continue
                    inner = self.program.computations[instruction.called[role][0]]
                    yield from self._run(inner, times * (1 if runs is None else runs), True, None)
            elif instruction.opcode == "conditional":
                chosen = self.branches(instruction)[self.branch(instruction)]
                yield from self._run(chosen, times, in_loop, None)
            elif instruction.opcode in RUNNING:
                for inner in self.program.called_by(instruction):
                    yield from self._run(inner, times, in_loop, execution)


# Following the counter of a loop with this many rounds would take too long: its trip count stays unknown.
MOST_ROUNDS = 100_000

_INTEGER_RULES: dict[str, Callable[[int, int], int]] = {  # by opcode, or by the direction of a comparison
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
# (parameter number, index in its tuple) -> the integer at that place; None where it is unknown.
_Reader = Callable[[int, tuple[int, ...]], int | None]


def trips_of(program: Program, home: Computation, loop: Instruction) -> int | None:
    """Return the trip count of `loop` in computation `home`; None where it is unknown.

    Counted: annotated loops, and loops whose condition depends only on integers of the loop state that start
    at constants and change by integer arithmetic. `jax.lax.scan` and `fori_loop` with fixed bounds make such
    loops. A loop that depends on data runs as often as a scope around it says. Not counted: loops that depend
    on data without such a scope, and unannotated loops of `MOST_ROUNDS` rounds or more.
    """
    known = expected_trips(loop.op_name) if loop.trip_count is None else loop.trip_count
    if known is not None:
        return known
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
    rule = _INTEGER_RULES.get(instruction.attributes["direction"] if opcode == "compare" else opcode)
    if rule is None:
        return None
    left, right = argument(0), argument(1)
    return None if left is None or right is None else int(rule(left, right))


def _integer(literal: str) -> int | None:
    if literal in ("true", "false"):
        return int(literal == "true")
    return int(literal) if literal.lstrip("-").isdigit() else None


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
        self._home: dict[str, tuple[Computation, Instruction]] = {}
        # By the name of a called computation: the caller, and the computation around it.
        self._callers: dict[str, tuple[Computation, Instruction]] = {}
        for place in program.instructions():
            instruction = place[1]
            self._home[instruction.name] = place
            if instruction.called and instruction.opcode in (*_ENTERED, "while"):
                self._callers.update(dict.fromkeys(instruction.all_called, place))

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

    def caller_of(self, home: Computation) -> tuple[Computation, Instruction] | None:
        """Return the instruction that runs a computation, and the computation around that; or None."""
        return self._callers.get(home.name)

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
        """Return the instruction that hands a value on to this one; None if the value is made here."""
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
        """Return the value passed to a parameter: by the caller, or by the previous round of a loop."""
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
