"""Count the FLOPs that the optimised program executes, by phase, module and number format.

Each instruction's FLOPs (see `_rules`) are multiplied by how often it runs. Counted: products, convolutions
and attention; elementwise work in separate sums by class. A `while` whose trip count is unknown is counted
once and listed as unpriced. A `conditional` costs as much as its most expensive branch, and is listed among
the assumptions. A conditional of Meshwright's own may declare how often that branch is taken (`taken_A_of_B`,
see `hlo._scopes`). Then that share counts, rounded down to whole FLOPs. Not counted: see `_rules`.

XLA's dot merger joins products that share an operand, such as those of queries, keys and values. The merged
product takes the other operands concatenated, and keeps the name of one of them. The traced program has each
product under its own module. FLOPs that a module lacks compared with the traced program are therefore taken
from merged products of its siblings: the modules in the same scope, in the same phase. Likewise, where a
module's first run is dead code and only its recomputation is executed, the recomputation counts as first run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from meshwright.hlo import (
    MOVING,
    RUNNING,
    Computation,
    Execution,
    Executions,
    Instruction,
    Phases,
    Program,
    has_path,
    module_of,
    shares_of,
)

from ._rules import Work, elementwise_of, unpriced_work, work_of

ByPhaseAndModule = Mapping[str, Mapping[str, int]]
Counts = Counter[tuple[str, str]]  # by phase and module


class Merged:
    """Find the merged products of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._fusions = {
            i.all_called[0]: (computation, i)
            for computation, i in program.instructions()
            if i.opcode == "fusion"
        }

    def holds(self, computation: Computation, product: Instruction, module: str) -> bool:
        """Return whether an operand of a product is a concatenation that XLA made to merge products.

        XLA names it after the product or not at all; in jaxlib 0.12 also after the scope around the product's
        module. In that scope, a concatenation that the model writes itself (rotated halves of a head) has a
        name that ends in "/concatenate", and is not a merger.
        """
        for operand in product.operands[:2]:
            found = self._maker(computation, computation.by_name[operand.name])
            if found is not None and found.opcode == "concatenate":
                if not has_path(found):
                    return True
                place, is_models = module_of(found.op_name), found.op_name.endswith("/concatenate")
                return place == module or (place == _scope(module) and not is_models)
        return False

    def _maker(self, home: Computation, value: Instruction) -> Instruction | None:
        """Return the instruction that computes a value, looking through data movement and fusions."""
        seen: set[str] = set()
        while value.name not in seen:
            seen.add(value.name)
            if value.opcode == "parameter" and home.name in self._fusions:
                number = int(value.literal)
                home, fusion = self._fusions[home.name]
                value = home.by_name[fusion.operands[number].name]
            elif value.opcode == "fusion":
                home = self._program.computations[value.all_called[0]]
                value = home.root
            elif value.opcode in MOVING and value.operands:
                value = home.by_name[value.operands[0].name]
            else:
                return value
        return None


def shared_out(counts: Counts, merged: Counts, traced: ByPhaseAndModule) -> Counts:
    """Return executed FLOPs with the merged products divided among the modules that they belong to.

    A module needs its FLOPs in the traced program less those that it executes outside merged products. The
    merged products of a scope are divided among its modules in proportion to these needs. They stay where
    they are if no module needs any.

    Args:
        counts: over all devices, by phase and module; each merged product under the one name that it has.
        merged: the part of `counts` in merged products.
        traced: the traced program's FLOPs, by phase and module.
    """
    found = Counter(counts)
    found.subtract(merged)
    pools: Counter[tuple[str, str]] = Counter()
    for (phase, module), flops in merged.items():
        pools[phase, _scope(module)] += flops
    for (phase, scope), pool in pools.items():
        needs = {
            module: flops - found[phase, module]
            for module, flops in traced.get(phase, {}).items()
            if _scope(module) == scope and flops > found[phase, module]
        }
        names = [module for its, module in merged if its == phase and _scope(module) == scope]
        if not needs:
            needs = {module: merged[phase, module] for module in names}
        left = pool
        for module, need in needs.items():
            share = int(Fraction(pool * need, sum(needs.values())))
            found[phase, module] += share
            left -= share
        found[phase, names[0]] += left  # the remainder of rounding
    return Counter({key: flops for key, flops in found.items() if flops})


def first_runs(counts: Counts, traced: ByPhaseAndModule) -> Counter[str]:
    """Return by module the FLOPs that are executed under the name of recomputation and are the only run.

    In such a module the traced program has a first run that is not executed, and the executed program
    recomputes more than the traced program.
    """
    found: Counter[str] = Counter()
    for module, flops in traced.get("forward", {}).items():
        missing = flops - counts["forward", module]
        beyond = counts["recompute", module] - traced.get("recompute", {}).get(module, 0)
        if missing > 0 and beyond > 0:
            found[module] = min(missing, beyond)
    return found


def _scope(module: str) -> str:
    return module.rpartition("/")[0]


_VIEWS = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "while", "conditional")


@dataclass(slots=True)
class ExecutedFlops:
    """Sums over one device's program.

    `merged`: the part of `by_phase_and_module` in merged products, each under one of its modules' names.
    `first_by_module`: work that is not recomputation, without the bubble's. `bubble`: the part of the sums
    that a pipeline stage computes without a microbatch; a fraction, because only the sum over its loops is
    whole. `elementwise`: operations by class, which are in no other sum. `unpriced`: how often each entry
    runs. `assumptions`: how often each conditional runs.
    """

    by_phase: Counter[str] = field(default_factory=Counter[str])
    by_format: Counter[str] = field(default_factory=Counter[str])
    by_kind: Counter[str] = field(default_factory=Counter[str])
    by_phase_and_module: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    merged: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    first_by_module: dict[str, Fraction] = field(default_factory=dict[str, Fraction])
    bubble: Fraction = Fraction(0)
    elementwise: Counter[str] = field(default_factory=Counter[str])
    unpriced: Counter[str] = field(default_factory=Counter[str])
    assumptions: Counter[str] = field(default_factory=Counter[str])

    @property
    def total(self) -> int:
        """FLOPs of all phases."""
        return self.by_phase.total()


def executions_of(program: Program) -> Executions:
    """Return the executions of a program, with the branch of most multiply-adds for each conditional.

    Among equal branches, choose the one whose instructions write the most bytes.
    """
    return Executions(program, _weight)


def _weight(program: Program, computation: Computation, instruction: Instruction) -> tuple[int, int]:
    found = work_of(computation, instruction)
    written = 0 if instruction.opcode in _VIEWS else sum(array.num_bytes for array in instruction.shapes)
    return found.flops if found else 0, written


def executed_flops(executions: Executions) -> ExecutedFlops:
    """Return the FLOPs that one device executes in one step."""
    count = _Count(executions)
    for execution in executions:
        count.add(execution)
    return count.total


def instruction_work(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Work, ...]:
    """Return the multiply-adds of one run of a scheduled instruction, including those inside its fusion.

    Loops and branches are not entered: the caller, which walks the schedule, walks their bodies itself.
    """
    found = work_of(computation, instruction)
    inner: list[Work] = [found] if found else []
    if instruction.opcode in RUNNING:
        for name in instruction.all_called:
            called = program.computations[name]
            for each in called.instructions:
                inner.extend(instruction_work(program, called, each))
    return tuple(inner)


_Place = tuple[Computation, Instruction]


class _Count:
    """Sum up executions."""

    def __init__(self, executions: Executions) -> None:
        self.total = ExecutedFlops()
        self._executions = executions
        self._program = executions.program
        self._phases = Phases(self._program)
        self._merged = Merged(self._program)

    def add(self, execution: Execution) -> None:
        home, instruction, times = execution.computation, execution.instruction, execution.times
        if found := work_of(home, instruction):
            self._multiply_adds(found, execution)
        elif done := elementwise_of(self._program, home, instruction):
            self.total.elementwise[done[0]] += times * done[1]
        elif unpriced := unpriced_work(home, instruction):
            self.total.unpriced[unpriced] += times
        if instruction.opcode == "while" and self._executions.trips(home, instruction) is None:
            self.total.unpriced[_unknown_length(instruction)] += times
        elif instruction.opcode == "conditional":
            self._conditional(instruction, times)

    def _multiply_adds(self, work: Work, execution: Execution) -> None:
        """Add the work of one instruction under the module where a reader would look for it."""
        total, place = self.total, self._named(execution)
        phase, module = self._phases.of(*place), module_of(place[1].op_name)
        shares = shares_of(place[1].op_name)
        taken = shares.get("taken", 1)
        flops, again = (int(execution.times * n * taken) for n in (work.flops, work.recompute_flops))
        for its, amount in ((phase, flops - again), ("recompute", again)):
            if amount:
                total.by_phase[its] += amount
                total.by_phase_and_module[its, module] += amount
        if work.kind == "matmul" and self._merged.holds(execution.computation, execution.instruction, module):
            total.merged[phase, module] += flops
        total.by_format[work.format] += flops
        total.by_kind[work.kind] += flops
        busy = shares.get("busy", Fraction(1))
        total.bubble += flops * (1 - busy)
        if phase != "recompute":
            before = total.first_by_module.get(module, Fraction(0))
            total.first_by_module[module] = before + (flops - again) * busy

    def _named(self, execution: Execution) -> _Place:
        """Return the instruction whose path names an execution, and its computation.

        A fusion names the unnamed instructions inside it. A fusion that recomputes names all of them.
        """
        caller = execution.caller
        if caller is not None and caller.instruction.opcode in ("fusion", "async-start"):
            outer = self._named(caller)
            if not has_path(execution.instruction) or self._phases.repeats(outer[1]):
                return outer
        return execution.computation, execution.instruction

    def _conditional(self, instruction: Instruction, times: int) -> None:
        """Record which branch is counted, and list the unpriced work of the other branches."""
        chosen, branches = self._executions.branch(instruction), self._executions.branches(instruction)
        lacking = [self._unpriced_in(branch, times) for branch in branches]
        most: Counter[str] = Counter()
        for unpriced in lacking:
            most |= unpriced
        self.total.unpriced.update(most - lacking[chosen])
        place = self._program.source_line(instruction) or instruction.op_name or f"%{instruction.name}"
        text = f"conditional at {place}: counted by its dearest branch, {chosen + 1} of {len(branches)}"
        if taken := shares_of(instruction.op_name).get("taken"):
            text += f", FLOPs by the {taken} of all runs that take it"
        self.total.assumptions[text] += times

    def _unpriced_in(self, branch: Computation, times: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for execution in self._executions.within(branch, times):
            home, instruction = execution.computation, execution.instruction
            if work_of(home, instruction) or elementwise_of(self._program, home, instruction):
                continue
            if unpriced := unpriced_work(home, instruction):
                found[unpriced] += execution.times
            if instruction.opcode == "while" and self._executions.trips(home, instruction) is None:
                found[_unknown_length(instruction)] += execution.times
        return found


def _unknown_length(loop: Instruction) -> str:
    place = loop.op_name or "an unnamed operation"
    return f"while %{loop.name} of unknown length, from {place}: body counted once"
