"""Count the FLOPs that the optimised program executes, by phase, module and number format.

Each instruction's FLOPs (see `_work_rules`) are multiplied by how often it runs. Counted: products,
convolutions and attention; elementwise work in separate sums by class. A `while` whose trip count is unknown
is counted once and listed as unpriced. A `conditional` costs as much as its most expensive branch, and is
listed among the assumptions; no step of Meshwright's own has one. Not counted: see `_work_rules`.

XLA's dot merger joins products that share an operand, such as those of queries, keys and values. The merged
product takes the other operands concatenated, and keeps the name of one of them. The traced program has each
product under its own module. FLOPs that a module lacks compared with the traced program are therefore taken
from merged products of its siblings: the modules in the same scope, in the same phase. Likewise, where a
module's first run is dead code and only its recomputation is executed, the recomputation counts as first run.

XLA's CPU backend replaces some products by products without a name: gradients of a convolution's weights, and
products with a single column. Each of them belongs to a module that lacks as many FLOPs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from meshwright.compiler import Compiled
from meshwright.hlo import (
    RUNNING,
    Computation,
    Dataflow,
    Execution,
    Executions,
    Instruction,
    Program,
    ProgramPhases,
    module_of,
    shares_of,
)

from ._ledger_records import FlopLedger
from ._work_rules import MultiplyAdds, calls_the_host, elementwise_of, unpriced_work, work_of

ByPhaseAndModule = Mapping[str, Mapping[str, int]]
Counts = Counter[tuple[str, str]]  # by phase and module
_WITHOUT_RESULT = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "while", "conditional")


@dataclass(frozen=True, slots=True)
class Unnamed:
    """A product that the compiler left without a name. `near`: modules around it, the likeliest first."""

    phase: str
    flops: int
    near: tuple[str, ...] = ()


@dataclass(slots=True)
class ExecutedFlops:
    """Sums over one device's program.

    `merged`: the part of `by_phase_and_module` in merged products, each under one of its modules' names.
    `first_by_module`: work that is not recomputation, without the bubble's. `bubble`: the part of the sums
    that a pipeline stage computes without a microbatch; a fraction, because only the sum over its loops is
    whole. `by_line`: products by source line and format. `elementwise`: operations by class, which are in no
    other sum. `unpriced`: how often each entry
    runs. `assumptions`: how often each conditional runs. `unnamed`: the products that nothing names; they are
    in `by_phase_and_module` too, under no module.
    """

    by_phase: Counter[str] = field(default_factory=Counter[str])
    by_format: Counter[str] = field(default_factory=Counter[str])
    by_phase_and_module: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    merged: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    first_by_module: dict[str, Fraction] = field(default_factory=dict[str, Fraction])
    bubble: Fraction = Fraction(0)
    elementwise: Counter[str] = field(default_factory=Counter[str])
    by_line: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    unpriced: Counter[str] = field(default_factory=Counter[str])
    assumptions: Counter[str] = field(default_factory=Counter[str])
    unnamed: list[Unnamed] = field(default_factory=list[Unnamed])

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
    work = work_of(computation, instruction)
    written = 0 if instruction.opcode in _WITHOUT_RESULT else instruction.num_bytes
    return work.flops if work else 0, written


def instruction_work(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[MultiplyAdds, ...]:
    """Return the multiply-adds of one run of a scheduled instruction, including those inside its fusion.

    Loops and branches are not entered: the caller, which walks the schedule, walks their bodies itself.
    """
    own = work_of(computation, instruction)
    work = [own] if own else []
    if instruction.opcode in RUNNING:
        for home, inner in program.inside(instruction):
            work.extend(instruction_work(program, home, inner))
    return tuple(work)


def executed_flops(executions: Executions) -> ExecutedFlops:
    """Return the FLOPs that one device executes in one step."""
    count = _Count(executions)
    for execution in executions:
        count.add(execution)
    count.calls_to_the_host()
    return count.total


class _Count:
    """Sum up executions."""

    def __init__(self, executions: Executions) -> None:
        self.total = ExecutedFlops()
        self._executions, self._program = executions, executions.program
        self._phases, self._dataflow = ProgramPhases(self._program), Dataflow(self._program)

    def add(self, execution: Execution) -> None:
        home, instruction, times = execution.computation, execution.instruction, execution.times
        if work := work_of(home, instruction):
            self._multiply_adds(work, execution)
        elif elementwise := elementwise_of(self._program, home, instruction):
            self.total.elementwise[elementwise[0]] += times * elementwise[1]
        elif unpriced := self._unpriced(execution):
            self.total.unpriced[unpriced] += times
        if instruction.opcode == "conditional":
            self._conditional(instruction, times)

    def calls_to_the_host(self) -> None:
        """Record each place of the program, taken branch or not, that calls a function on the host."""
        places: set[str] = set()
        for _, instruction in self._program.instructions():
            if calls_the_host(instruction):
                what = instruction.op_name.rpartition("/")[2] or instruction.opcode
                line = self._program.source_line(instruction)
                places.add(f"{what} at {line}" if line else what)
        for place in sorted(places):
            text = f"{place} calls the host: its work there, and the transfer, are in no figure"
            self.total.assumptions[text] += 1

    def _multiply_adds(self, work: MultiplyAdds, execution: Execution) -> None:
        """Add the work of one instruction under the module where a reader would look for it."""
        total, (home, named) = self.total, self._named(execution)
        phase, module = self._phases.of(home, named), module_of(named.op_name)
        shares = shares_of(named.op_name)
        flops, again = (execution.times * n for n in (work.flops, work.recompute_flops))
        for its, amount in ((phase, flops - again), ("recompute", again)):
            if amount:
                total.by_phase[its] += amount
                total.by_phase_and_module[its, module] += amount
        if not named.has_path:
            total.unnamed.append(Unnamed(phase, flops, tuple(self._phases.modules_near(home, named))))
        elif work.kind == "matmul" and self._is_merged(execution.computation, execution.instruction, module):
            total.merged[phase, module] += flops
        total.by_format[work.format] += flops
        total.by_line[self._program.source_line(named), work.format] += flops
        busy = shares.get("busy", Fraction(1))
        total.bubble += flops * (1 - busy)
        if phase != "recompute":
            before = total.first_by_module.get(module, Fraction(0))
            total.first_by_module[module] = before + (flops - again) * busy

    def _named(self, execution: Execution) -> tuple[Computation, Instruction]:
        """Return the instruction whose path names an execution, and its computation.

        A fusion names the unnamed instructions inside it. A fusion that recomputes names all of them.
        """
        caller = execution.caller
        if caller is not None and caller.instruction.opcode in ("fusion", "async-start"):
            outer = self._named(caller)
            if not execution.instruction.has_path or self._phases.is_repeated(outer[1]):
                return outer
        return execution.computation, execution.instruction

    def _is_merged(self, computation: Computation, product: Instruction, module: str) -> bool:
        """Return whether an operand of a product is a concatenation that XLA made to merge products.

        XLA names it after the product or not at all; in jaxlib 0.12 also after the scope around the product's
        module. In that scope, a concatenation that the model writes itself (rotated halves of a head) has a
        name that ends in "/concatenate", and is not a merger.
        """
        for operand in product.operands[:2]:
            maker = self._dataflow.maker(computation, computation.by_name[operand.name])
            if maker.opcode == "concatenate":
                if not maker.has_path:
                    return True
                place, is_models = module_of(maker.op_name), maker.op_name.endswith("/concatenate")
                return place == module or (place == _scope(module) and not is_models)
        return False

    def _conditional(self, instruction: Instruction, times: int) -> None:
        """Record which branch is counted, and list the unpriced work of the other branches."""
        chosen, branches = self._executions.branch(instruction), self._executions.branches(instruction)
        lacking = [self._unpriced_in(branch, times) for branch in branches]
        most: Counter[str] = Counter()
        for unpriced in lacking:
            most |= unpriced
        self.total.unpriced.update(most - lacking[chosen])
        place = self._program.source_line(instruction) or instruction.op_name or f"%{instruction.name}"
        text = (
            f"conditional at {place}: counted by its most expensive branch, {chosen + 1} of {len(branches)}"
        )
        self.total.assumptions[text] += times

    def _unpriced_in(self, branch: Computation, times: int) -> Counter[str]:
        unpriced: Counter[str] = Counter()
        for execution in self._executions.within(branch, times):
            if entry := self._unpriced(execution):
                unpriced[entry] += execution.times
        return unpriced

    def _unpriced(self, execution: Execution) -> str | None:
        """Describe an instruction without a rule, or a loop of unknown length; return None for any other."""
        home, instruction = execution.computation, execution.instruction
        if instruction.opcode == "while" and self._executions.trips(home, instruction) is None:
            place = instruction.op_name or "an unnamed operation"
            return f"while %{instruction.name} of unknown length, from {place}: body counted once"
        return unpriced_work(home, instruction)


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
    shared = Counter(counts)
    shared.subtract(merged)
    pools: Counter[tuple[str, str]] = Counter()
    for (phase, module), flops in merged.items():
        pools[phase, _scope(module)] += flops
    for (phase, scope), pool in pools.items():
        needs = {
            module: flops - shared[phase, module]
            for module, flops in traced.get(phase, {}).items()
            if _scope(module) == scope and flops > shared[phase, module]
        }
        names = [module for its, module in merged if its == phase and _scope(module) == scope]
        if not needs:
            needs = {module: merged[phase, module] for module in names}
        left = pool
        for module, need in needs.items():
            share = int(Fraction(pool * need, sum(needs.values())))
            shared[phase, module] += share
            left -= share
        shared[phase, names[0]] += left  # the remainder of rounding
    return Counter({key: flops for key, flops in shared.items() if flops})


def homes_of(unnamed: Iterable[Unnamed], counts: Counts, traced: ByPhaseAndModule) -> Counts:
    """Return the FLOPs of unnamed products by phase and by the module that each belongs to.

    A module lacks its FLOPs in the traced program less those in `counts`. A product belongs to the first of
    the modules near it that lacks as many FLOPs or more; else to the module of its phase that lacks as many
    or, of those that lack more, the fewest; else to the one that lacks most. Padding is the usual difference:
    the traced program counts a convolution's taps on it. The products with a near module come first, and of
    the others the largest. Where no module of its phase lacks any FLOPs, a product stays without a module.

    Args:
        unnamed: the products, with the FLOPs of all devices.
        counts: by phase and module, with these products under no module.
        traced: the traced program's FLOPs, by phase and module.
    """
    homes: Counts = Counter()
    lacking = {
        phase: {module: flops - counts[phase, module] for module, flops in modules.items() if module}
        for phase, modules in traced.items()
    }

    def place(product: Unnamed, module: str) -> None:
        homes[product.phase, module] += product.flops
        lacking[product.phase][module] -= product.flops

    alone: list[Unnamed] = []
    for product in sorted(unnamed, key=lambda product: -product.flops):
        needs = lacking.get(product.phase, {})
        near = next((module for module in product.near if needs.get(module, 0) >= product.flops), None)
        if near is None:
            alone.append(product)
        else:
            place(product, near)
    for product in alone:
        needs = {module: need for module, need in lacking.get(product.phase, {}).items() if need > 0}
        if needs:
            by_fit = {
                module: (need < product.flops, abs(need - product.flops)) for module, need in needs.items()
            }
            place(product, min(by_fit, key=lambda module: by_fit[module]))
    return homes


def first_runs(counts: Counts, traced: ByPhaseAndModule) -> Counter[str]:
    """Return by module the FLOPs that are executed under the name of recomputation and are the only run.

    In such a module the traced program has a first run that is not executed, and the executed program
    recomputes more than the traced program.
    """
    first: Counter[str] = Counter()
    for module, flops in traced.get("forward", {}).items():
        missing = flops - counts["forward", module]
        beyond = counts["recompute", module] - traced.get("recompute", {}).get(module, 0)
        if missing > 0 and beyond > 0:
            first[module] = min(missing, beyond)
    return first


def _scope(module: str) -> str:
    return module.rpartition("/")[0]


def flop_ledger(compiled: Compiled, executed: ExecutedFlops) -> FlopLedger:
    """Return the FLOPs of all devices, each of which runs the same program."""
    devices, traced = compiled.num_devices, compiled.traced_flops
    parameters, tokens = compiled.num_parameters, compiled.tokens_per_step
    ruled = None not in (parameters, tokens, compiled.num_matmul_parameters)
    counts, merged = (
        Counter({key: devices * flops for key, flops in sums.items()})
        for sums in (executed.by_phase_and_module, executed.merged)
    )
    shared = shared_out(counts, merged, traced.by_phase_and_module)
    unnamed = (replace(product, flops=devices * product.flops) for product in executed.unnamed)
    homes = homes_of(unnamed, shared, traced.by_phase_and_module)
    by_phase = Counter({phase: devices * flops for phase, flops in executed.by_phase.items() if flops})
    first = Counter({module: int(devices * flops) for module, flops in executed.first_by_module.items()})
    for (phase, module), flops in homes.items():
        shared[phase, module] += flops
        shared[phase, ""] -= flops
        if phase != "recompute":
            first[module] += flops
            first[""] -= flops
    only = first_runs(shared, traced.by_phase_and_module)
    if only:
        by_phase["forward"] += only.total()
        by_phase["recompute"] -= only.total()
        first += only
    by_module: Counter[str] = Counter()
    for (_, module), flops in shared.items():
        if flops:
            by_module[module] += flops
    by_line: dict[str, dict[str, int]] = {}
    for (line, format_name), flops in executed.by_line.most_common():
        if flops:
            by_line.setdefault(line, {})[format_name] = devices * flops
    return FlopLedger(
        model=sum(flops for phase, flops in traced.by_phase.items() if phase != "recompute"),
        executed=devices * executed.total,
        recomputed=by_phase["recompute"],
        by_phase={phase: flops for phase, flops in by_phase.items() if flops},
        by_format={name: devices * flops for name, flops in executed.by_format.items() if flops},
        by_module=dict(by_module.most_common()),
        model_by_module=traced.by_module,
        waste_by_module=_waste(traced.by_module, first),
        rule_6nd=6 * (parameters or 0) * (tokens or 0) if ruled else None,
        bubble=int(devices * executed.bubble),
        elementwise_by_class={name: devices * n for name, n in executed.elementwise.most_common() if n},
        by_line=by_line,
    )


def _waste(model: dict[str, int], executed: Mapping[str, int]) -> dict[str, int]:
    """Return the FLOPs executed beyond the model by the scope around each module, most first.

    The module itself is not used: where the compiler merges products (such as those of queries and keys), it
    keeps the name of one of them. The result is empty for a program that was compiled before modules were
    counted. Convolutions with padding execute fewer FLOPs than the model counts, which hides as much waste in
    the same scope.
    """
    if not model:
        return {}
    beyond: Counter[str] = Counter()
    for sign, counts in ((1, executed), (-1, model)):
        for module, flops in counts.items():
            beyond[module.rpartition("/")[0] or module] += sign * flops
    return {module: flops for module, flops in beyond.most_common() if flops > 0}
