"""List the instructions that one device executes in a step, and how often each runs.

`ledger` counts FLOPs and messages over this list. `predict` uses its trip counts and branches, so that both
describe the same execution. A loop's body runs as often as `trips_of` finds, or once where that is unknown.
Only the branch with the most work is listed of a conditional; the caller defines what work is.
Instructions inside a fusion, a call or an asynchronous computation are listed too, after their caller.
The scalar computation of a reduction, a sort or a scatter is not entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ._loops import trips_of
from ._text import Computation, Instruction, Program

RUNNING = ("fusion", "call", "async-start", "custom-call")
"""Opcodes that execute the computations they name as they stand."""

Work = tuple[int, ...]
Weigher = Callable[[Program, Computation, Instruction], Work]
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
    >>> [(each.instruction.opcode, each.times) for each in executions]
    [('parameter', 1), ('negate', 1)]
    """

    def __init__(self, program: Program, weigh: Weigher) -> None:
        self.program = program
        self._weigh = weigh
        self._trips: dict[str, int | None] = {}
        self._branches: dict[str, int] = {}
        self._work: dict[str, Work] = {}
        self._all: tuple[Execution, ...] | None = None

    def __iter__(self) -> Iterator[Execution]:
        if self._all is None:
            self._all = tuple(self.within(self.program.entry))
        return iter(self._all)

    def within(
        self, computation: Computation, times: int = 1, *, in_loop: bool = False
    ) -> Iterator[Execution]:
        """Yield the executions of `times` runs of a computation, including those of what it calls."""
        yield from self._run(computation, times, in_loop, None)

    def trips(self, home: Computation, loop: Instruction) -> int | None:
        """Return the trip count of a `while` in computation `home`; None where it is unknown."""
        if loop.name not in self._trips:
            self._trips[loop.name] = trips_of(self.program, home, loop)
        return self._trips[loop.name]

    def branches(self, conditional: Instruction) -> tuple[Computation, ...]:
        """Return the branches of a conditional, in the order in which the conditional names them."""
        return tuple(self.program.computations[name] for name in conditional.all_called)

    def branch(self, conditional: Instruction) -> int:
        """Return the index in `branches` of the branch with the most work; of equals, the first."""
        if conditional.name not in self._branches:
            work = [self._work_of(branch) for branch in self.branches(conditional)]
            self._branches[conditional.name] = work.index(max(work))
        return self._branches[conditional.name]

    def _work_of(self, computation: Computation) -> Work:
        if computation.name not in self._work:
            total: Work = ()
            for each in self.within(computation):
                one = self._weigh(self.program, each.computation, each.instruction)
                total = tuple(a + each.times * b for a, b in zip(total or (0,) * len(one), one, strict=True))
            self._work[computation.name] = total
        return self._work[computation.name]

    def _run(
        self, computation: Computation, times: int, in_loop: bool, caller: Execution | None
    ) -> Iterator[Execution]:
        for instruction in computation.instructions:
            execution = Execution(
                computation=computation,
                instruction=instruction,
                times=times,
                in_loop=in_loop,
                caller=caller,
            )
            yield execution
            if instruction.opcode == "while":
                trips = self.trips(computation, instruction)
                for role, runs in (("body", trips), ("condition", None if trips is None else trips + 1)):
                    inner = self.program.computations[instruction.called[role][0]]
                    yield from self._run(inner, times * (1 if runs is None else runs), True, None)
            elif instruction.opcode == "conditional":
                chosen = self.branches(instruction)[self.branch(instruction)]
                yield from self._run(chosen, times, in_loop, None)
            elif instruction.opcode in RUNNING:
                for name in instruction.all_called:
                    yield from self._run(self.program.computations[name], times, in_loop, execution)
