"""List the instructions that one device executes in a step, with how often each runs.

`ledger` counts FLOPs and messages over this list, and `predict` takes its trip counts and its branches, so
that all of them speak of the same run. A loop's body runs as often as `trips_of` finds, once where that is
unknown. Of a conditional one branch is chosen, the one with most work; what work is, the caller says.
Instructions inside a fusion, a call or an asynchronous computation are executions too, below their caller.
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

    `times`: runs on one device in one step. `in_loop`: whether a `while` is around it. `caller`: the fusion,
    call or asynchronous start that it is inside of; None for an instruction of the schedule.
    """

    computation: Computation
    instruction: Instruction
    times: int
    in_loop: bool
    caller: Execution | None


class Executions:
    """The executions of one program: iterate to get them in the order of the schedule.

    Args:
        program: the optimised program.
        weigh: the work of one instruction, by which the branch of a conditional is chosen.

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
        """Yield the executions of `times` runs of a computation, those of what it calls included."""
        yield from self._run(computation, times, in_loop, None)

    def trips(self, home: Computation, loop: Instruction) -> int | None:
        """Return how often a `while` of `home` runs its body; None where that depends on data."""
        if loop.name not in self._trips:
            self._trips[loop.name] = trips_of(self.program, home, loop)
        return self._trips[loop.name]

    def branches(self, conditional: Instruction) -> tuple[Computation, ...]:
        """Return the branches of a conditional, in the order in which it names them."""
        return tuple(self.program.computations[name] for name in conditional.all_called)

    def branch(self, conditional: Instruction) -> int:
        """Return the place among `branches` of the one with most work; of equals, the first."""
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
