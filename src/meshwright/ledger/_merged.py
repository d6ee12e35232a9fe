"""Executed FLOPs by module where XLA merged like products, as those of queries, keys and values.

XLA's dot merger joins products that share an operand into one, of the other operands concatenated, and keeps
the name of one of them. The traced program has each product under its own module: what a module lacks beside
it is taken from the merged products of its siblings, the modules in the same scope, in the same phase.
Likewise, where a module's first run is dead and only what remat runs again is executed, that is its first
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from meshwright.compiler import module_of

from ._origins import MOVING
from ._phases import has_path
from .hlo import Computation, Instruction, Program

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
