"""What would make a step faster: the same schedule walked again with one thing left out or moved.

Each saving is a bound: what is left out costs nothing in its place, the schedule is not made anew, and what
the change would cost elsewhere is not counted. `--explain` compiles real changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.compiler import Compiled
from meshwright.hardware import Fleet
from meshwright.ledger import MemoryLedger
from meshwright.ledger._phases import Phases
from meshwright.ledger.hlo import Computation, Instruction, Program
from meshwright.units import format_bytes

from ._machine import Machine
from ._records import Help
from ._walk import Change, Prices, Walked, walk

LEAST_SHARE = 0.002  # of the step: what would be printed as 0 %
# By mesh axis; others' collectives are hidden or sent less of by the same means as tensor's.
_HOW = {
    "data": "reduce gradients less often (fewer microbatches), or give each device a larger batch",
    "fsdp": "a larger microbatch computes longer beside each gather; a smaller fsdp axis sends less",
    "context": "a longer sequence computes longer beside each hop; a smaller context axis hops less often",
    "tensor": "a smaller tensor axis sends less; a larger microbatch computes longer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """Walks over one program."""

    machine: Machine
    program: Program
    compiled: Compiled
    walked: Walked
    prices: Prices

    def saving(self, change: Change) -> float:
        """Seconds that a changed walk takes less; its kernels cost what they did."""
        again = walk(self.machine, self.program, self.compiled.mesh_axes, change, self.prices)
        return self.walked.seconds - again.seconds

    def saving_on(self, machine: Machine, prices: Prices | None = None) -> float:
        """Seconds that the walk takes less on another machine."""
        return (
            self.walked.seconds - walk(machine, self.program, self.compiled.mesh_axes, prices=prices).seconds
        )


def what_helps(
    machine: Machine,
    program: Program,
    compiled: Compiled,
    fleet: Fleet,
    memory: MemoryLedger,
    walked: Walked,
    prices: Prices,
) -> tuple[Help, ...]:
    """Savings of at least 0.2 % of the step, the largest first.

    Args:
        walked, prices: the walk over the program as it is, and what its kernels cost.
    """
    again = _Again(machine=machine, program=program, compiled=compiled, walked=walked, prices=prices)
    found = [
        *_hidden(again),
        *_inside(again, fleet),
        *_kept(again, memory),
        *_narrowed(again),
        *_without_gaps(again),
    ]
    least = LEAST_SHARE * walked.seconds
    return tuple(sorted((h for h in found if h.saving_seconds > least), key=lambda h: -h.saving_seconds))


def _exposed_axes(walked: Walked) -> dict[str, float]:
    """Seconds waited for the collectives along each set of axes, where there are any."""
    found: dict[str, float] = {}
    for name, axes in walked.transfers.items():
        if walked.exposed.get(name):
            found[axes] = found.get(axes, 0.0) + walked.exposed[name]
    return found


def _hidden(again: _Again) -> Iterator[Help]:
    for axes in _exposed_axes(again.walked):
        how = _HOW.get(axes.split(",")[-1], "a smaller axis sends less; a larger microbatch computes longer")
        yield Help(
            what=f"no waiting for collectives over {axes}",
            saving_seconds=again.saving(Change(hidden=axes)),
            how=how,
            certainty="upper bound: all of them hidden behind computation, or gone",
        )


def _inside(again: _Again, fleet: Fleet) -> Iterator[Help]:
    """Axes that cross domains though their groups would find room in one."""
    sizes = dict(again.compiled.mesh_axes)
    for axes in _exposed_axes(again.walked):
        names = axes.split(",")
        if not set(names) <= set(sizes):
            continue  # groups that lie along no axis
        members = 1
        for name in names:
            members *= sizes[name]
        if not 1 < members <= fleet.chips_per_domain < fleet.num_devices:
            continue
        yield Help(
            what=f"collectives over {axes} inside one domain instead of between several",
            saving_seconds=again.saving(Change(inside=axes)),
            how=f"name {axes} last in the layout: its {members} devices then lie in one domain",
            certainty="upper bound: another axis then crosses domains in its place, which is not counted",
        )


def _kept(again: _Again, memory: MemoryLedger) -> Iterator[Help]:
    """Recomputation left out."""
    phases = Phases(again.program)
    repeats: dict[tuple[str, str], bool] = {}

    def skips(computation: Computation, instruction: Instruction) -> bool:
        key = (computation.name, instruction.name)
        if key not in repeats:
            runs = instruction.opcode in ("while", "conditional", "call")  # what is inside speaks for itself
            repeats[key] = not runs and phases.of(computation, instruction) == "recompute"
        return repeats[key]

    if memory.fits is None or memory.usable_bytes is None:
        room = "how much memory is free is not known"
    else:
        free = memory.usable_bytes - memory.reserved_bytes - memory.allowance_bytes
        room = f"{format_bytes(free)} are free" if free > 0 else "memory has no room for it as it is"
    yield Help(
        what="nothing computed again in the backward pass",
        saving_seconds=again.saving(Change(skips=skips)),
        how=f"keep more for the backward pass (remat); {room}",
        certainty="upper bound: what is kept instead may not fit, and is neither written nor read here",
    )


def _narrowed(again: _Again) -> Iterator[Help]:
    if "bf16" not in again.machine.peak_flops_per_second:
        return
    yield Help(
        what="products of float32 in bf16",
        saving_seconds=again.saving_on(replace(again.machine, narrow_products=True)),
        how='compute in bf16 (precision = "bf16", or a cast before the product)',
        certainty="upper bound: operands and results of half the bytes, casts not counted",
    )


def _without_gaps(again: _Again) -> Iterator[Help]:
    yield Help(
        what="no gaps between kernels",
        saving_seconds=again.saving_on(replace(again.machine, launch_seconds=0.0), again.prices),
        how="fewer and larger kernels: a larger microbatch, fewer of them",
        certainty="upper bound: more work in each launch does not remove the last one",
    )
