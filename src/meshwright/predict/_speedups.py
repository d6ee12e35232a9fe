"""Estimate what would make a step faster, by walking its schedule with one difference at a time.

A *change* is proposed only where a walk covers its whole effect. Another order of the layout's axes is one:
it only moves devices, so the link of every collective is derived again. A *bound* leaves something out of the
walk and proposes no change: a change that reaches it has costs elsewhere, which only compiling shows
(`weigh --explain`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.compiler import Compiled
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.hlo import Computation, Executions, Instruction, ProgramPhases
from meshwright.ledger import MemoryLedger
from meshwright.units import format_bytes

from ._collectives import Order
from ._machine import Machine
from ._records import Help
from ._walk import Change, Prices, Walked, walk

LEAST_SHARE = 0.002  # of the step; a smaller saving would print as 0 %
LEAST_SHARE_OF_AN_ORDER = 0.01  # of the step; larger, because the walk keeps the present order's schedule
MOST_ORDERS = 24  # all orders of four axes; more take longer than the compilation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """Repeated walks over one program."""

    machine: Machine
    executions: Executions
    compiled: Compiled
    walked: Walked
    prices: Prices

    def saving(self, change: Change) -> float:
        """Return the seconds that a change saves; prices of kernels stay the same."""
        again = walk(self.machine, self.executions, self.compiled.mesh_axes, change, self.prices)
        return self.walked.seconds - again.seconds

    def saving_on(self, machine: Machine, prices: Prices | None = None) -> float:
        """Return the seconds that another machine saves."""
        return (
            self.walked.seconds
            - walk(machine, self.executions, self.compiled.mesh_axes, prices=prices).seconds
        )


def what_helps(
    machine: Machine,
    executions: Executions,
    compiled: Compiled,
    fleet: Fleet,
    memory: MemoryLedger,
    walked: Walked,
    prices: Prices,
) -> tuple[Help, ...]:
    """Return the changes, then the bounds, the largest saving of each first.

    Args:
        walked, prices: the walk over the program as it is, and the prices of its kernels.
    """
    again = _Again(machine=machine, executions=executions, compiled=compiled, walked=walked, prices=prices)
    bounds = [*_hidden(again), *_kept(again, memory), *_narrowed(again), *_without_gaps(again)]
    least = LEAST_SHARE * walked.seconds
    told = [help_ for help_ in bounds if help_.saving_seconds > least]
    return (*_order(again, fleet), *sorted(told, key=lambda help_: -help_.saving_seconds))


def _hidden(again: _Again) -> Iterator[Help]:
    walked = again.walked
    exposed = {axes for name, axes in walked.transfers.items() if walked.exposed.get(name)}
    for axes in sorted(exposed):
        yield Help(
            what=f"no waiting for collectives over {axes}",
            saving_seconds=again.saving(Change(hidden=axes)),
            certainty="bound: all of them hidden behind computation, or gone",
        )


def _order(again: _Again, fleet: Fleet) -> Iterator[Help]:
    """Yield the fastest order of the layout's axes, if it is not the present one."""
    axes = [(name, size) for name, size in again.compiled.mesh_axes if size > 1]
    if fleet.chips_per_domain >= fleet.num_devices:
        return  # with one domain, no order crosses a slower link
    sizes = tuple(size for _, size in axes)
    best, least = None, LEAST_SHARE_OF_AN_ORDER * again.walked.seconds
    for places in itertools.islice(itertools.permutations(range(len(axes))), 1, MOST_ORDERS):
        try:
            saving = again.saving(Change(order=Order(sizes=sizes, axes=places)))
        except InputError:
            continue  # this order crosses a link whose rate is not known
        if saving > least:
            best, least = places, saving
    if best is None:
        return
    layout = ",".join(f"{axes[place][0]}={axes[place][1]}" for place in best)
    yield Help(
        what=f"the order of the axes {layout}",
        saving_seconds=least,
        change=f"--layout {layout}",
        certainty="walked whole: every collective on the links that this order gives it; the compiler may "
        "schedule it otherwise",
    )


def _kept(again: _Again, memory: MemoryLedger) -> Iterator[Help]:
    """Yield the bound without recomputation."""
    phases = ProgramPhases(again.executions.program)
    repeats: dict[tuple[str, str], bool] = {}

    def skips(computation: Computation, instruction: Instruction) -> bool:
        key = (computation.name, instruction.name)
        if key not in repeats:
            runs = instruction.opcode in ("while", "conditional", "call")  # bodies are checked on their own
            repeats[key] = not runs and phases.of(computation, instruction) == "recompute"
        return repeats[key]

    if memory.fits is None or memory.usable_bytes is None:
        room = "how much memory is free is not known"
    else:
        free = memory.usable_bytes - memory.reserved_bytes - memory.allowance_bytes
        room = f"{format_bytes(free)} are free" if free > 0 else "no memory is free"
    yield Help(
        what="nothing computed again in the backward pass",
        saving_seconds=again.saving(Change(skips=skips)),
        certainty=f"bound: writing and reading the values kept instead is not counted; {room}",
    )


def _narrowed(again: _Again) -> Iterator[Help]:
    if "bf16" not in again.machine.peak_flops_per_second:
        return
    yield Help(
        what="products of float32 in bf16",
        saving_seconds=again.saving_on(replace(again.machine, narrow_products=True)),
        certainty="bound: operands and results of half the bytes, casts not counted",
    )


def _without_gaps(again: _Again) -> Iterator[Help]:
    yield Help(
        what="no gaps between kernels",
        saving_seconds=again.saving_on(replace(again.machine, launch_seconds=0.0), again.prices),
        certainty="bound: fewer and larger kernels still have gaps",
    )
