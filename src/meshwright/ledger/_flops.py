"""Count the FLOPs that the optimised program executes, by phase, module and number format.

Executed FLOPs by module where XLA merged like products, as those of queries, keys and values.

XLA's dot merger joins products that share an operand into one, of the other operands concatenated, and keeps
the name of one of them. The traced program has each product under its own module: what a module lacks beside
it is taken from the merged products of its siblings, the modules in the same scope, in the same phase.
Likewise, where a module's first run is dead and only what remat runs again is executed, that is its first
run.

FLOPs that the optimised program executes: each instruction's, times how often it runs.

Counted and not counted: see `_rules`; beside them elementwise work by class, see `_elementwise`. A `while`
runs as often as the compiler knows; one of unknown length is counted once and named among the unpriced. A
`conditional` costs as much as its dearest branch, and is named among the assumptions; one of ours that says
how often it is taken (`taken_A_of_B`, see `compiler._modules`) that share of it, rounded down to whole FLOPs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from meshwright.hlo import module_of, shares_of

from ..hlo import MOVING, Computation, Instruction, Phases, Program, has_path, trips_of
from ._rules import Work, elementwise_of, unpriced_work, work_of

ByPhaseAndModule = Mapping[str, Mapping[str, int]]
Counts = Counter[tuple[str, str]]  # by phase and module


class Merged:
    """Finds the merged products of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._fusions = {
            i.all_called[0]: (computation, i)
            for computation, i in program.instructions()
            if i.opcode == "fusion"
        }

    def holds(self, computation: Computation, product: Instruction, module: str) -> bool:
        """Return whether an operand of a product is a concatenation that XLA made to merge products.

        XLA gives it the product's own name or none; in jaxlib 0.12 also a name from the scope around the
        product's module. A concatenation that the model writes itself (rotated halves of a head) ends in
        "/concatenate", and is no merger.
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
        """The instruction that makes a value, through movement, and into and out of fusions."""
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
    """Return executed FLOPs with the merged products shared among the modules that they belong to.

    Each module of a scope needs what the traced program has of it less what it executes by itself; the
    scope's merged products are shared in proportion. They stay where they are if no module lacks any.

    Args:
        counts: over all devices, by phase and module, merged products under the one name that they have.
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
        found[phase, names[0]] += left  # what rounding leaves
    return Counter({key: flops for key, flops in found.items() if flops})


def first_runs(counts: Counts, traced: ByPhaseAndModule) -> Counter[str]:
    """Return by module what is executed under the name of a repetition and is the only run.

    There the traced program has a first run that is not executed, and more is repeated than it repeats.
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


# What runs other instructions as they stand; a reduction's or sort's computation is scalar arithmetic.
RUNNING = ("fusion", "call", "async-start", "custom-call")


@dataclass(slots=True)
class ExecutedFlops:
    """Sums over one device's program; `unpriced` counts how often each entry runs.

    `by_phase_and_module`: `merged` is the part of it in merged products, under one of their names.
    `first_by_module`: work that is not recomputed, less the bubble's. `bubble`: of the sums, what a stage of
    a pipeline does without a microbatch, in fractions because only the sum over its loops is whole.
    `elementwise`: operations by class, none of them in the other sums. `assumptions`: conditionals.
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
        """All FLOPs counted."""
        return self.by_phase.total()

    def add(self, other: ExecutedFlops) -> None:
        """Add another's sums to these."""
        self.by_phase.update(other.by_phase)
        self.by_format.update(other.by_format)
        self.by_kind.update(other.by_kind)
        self.by_phase_and_module.update(other.by_phase_and_module)
        self.merged.update(other.merged)
        for module, flops in other.first_by_module.items():
            self.first_by_module[module] = self.first_by_module.get(module, Fraction(0)) + flops
        self.bubble += other.bubble
        self.elementwise.update(other.elementwise)
        self.unpriced.update(other.unpriced)
        self.assumptions.update(other.assumptions)


def executed_flops(program: Program) -> ExecutedFlops:
    """FLOPs of one device in one run of the entry computation."""
    return _Walk(program).computation(program.entry, 1, None)


def instruction_work(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Work, ...]:
    """The multiply-adds of one scheduled instruction run once, those inside its fusion or call included.

    Loops and branches are not entered: whoever walks the schedule walks their bodies.
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


class _Walk:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._phases = Phases(program)
        self._merged = Merged(program)

    def computation(self, computation: Computation, times: int, caller: _Place | None) -> ExecutedFlops:
        total = ExecutedFlops()
        for instruction in computation.instructions:
            place = (computation, instruction)
            if caller and (not has_path(instruction) or self._phases.repeats(caller[1])):
                place = caller  # the nameless inside of a fusion is part of what the fusion is
            if found := work_of(computation, instruction):
                self._count(total, found, (computation, instruction), place, times)
            elif done := elementwise_of(self._program, computation, instruction):
                total.elementwise[done[0]] += times * done[1]
            elif unpriced := unpriced_work(computation, instruction):
                total.unpriced[unpriced] += times
            if instruction.opcode == "while":
                total.add(self._loop(computation, instruction, times))
            elif instruction.opcode == "conditional":
                total.add(self._dearest(instruction, times))
            elif instruction.opcode in RUNNING:
                inside = place if instruction.opcode in ("fusion", "async-start") else None
                for name in instruction.all_called:
                    total.add(self.computation(self._program.computations[name], times, inside))
        return total

    def _count(self, total: ExecutedFlops, work: Work, here: _Place, place: _Place, times: int) -> None:
        """Add the work of the instruction `here`, under the name of the one at `place`."""
        phase, module = self._phases.of(*place), module_of(place[1].op_name)
        shares = shares_of(place[1].op_name)
        flops, again = (int(times * n * shares.get("taken", 1)) for n in (work.flops, work.recompute_flops))
        for its, amount in ((phase, flops - again), ("recompute", again)):
            if amount:
                total.by_phase[its] += amount
                total.by_phase_and_module[its, module] += amount
        if work.kind == "matmul" and self._merged.holds(*here, module):
            total.merged[phase, module] += flops
        total.by_format[work.format] += flops
        total.by_kind[work.kind] += flops
        busy = shares.get("busy", Fraction(1))
        total.bubble += flops * (1 - busy)
        if phase != "recompute":
            before = total.first_by_module.get(module, Fraction(0))
            total.first_by_module[module] = before + (flops - again) * busy

    def _loop(self, home: Computation, instruction: Instruction, times: int) -> ExecutedFlops:
        trips = trips_of(self._program, home, instruction)
        body, condition = (
            self._program.computations[instruction.called[k][0]] for k in ("body", "condition")
        )
        total = self.computation(body, times * (1 if trips is None else trips), None)
        total.add(self.computation(condition, times * (1 if trips is None else trips + 1), None))
        if trips is None:
            place = instruction.op_name or "an unnamed operation"
            total.unpriced[
                f"while %{instruction.name} of unknown length, from {place}: body counted once"
            ] += times
        return total

    def _dearest(self, instruction: Instruction, times: int) -> ExecutedFlops:
        """The branch with most multiply-adds; among equals, with most elementwise work."""
        branches = [
            self.computation(self._program.computations[n], times, None) for n in instruction.all_called
        ]
        dearest = max(branches, key=lambda branch: (branch.total, branch.elementwise.total()))
        number = branches.index(dearest) + 1
        for branch in branches:
            if branch is not dearest:
                dearest.unpriced |= branch.unpriced
                dearest.assumptions |= branch.assumptions
        place = self._program.source_line(instruction) or instruction.op_name or f"%{instruction.name}"
        text = f"conditional at {place}: counted by its dearest branch, {number} of {len(branches)}"
        if taken := shares_of(instruction.op_name).get("taken"):
            text += f", FLOPs by the {taken} of all runs that take it"
        dearest.assumptions[text] += times
        return dearest
