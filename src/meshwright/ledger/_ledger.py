"""Put together the ledger of a compiled program: its FLOPs, traffic, memory and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from meshwright.compiler import Compiled, Routing, read_text
from meshwright.hardware import Fleet
from meshwright.hlo import Executions, Frame, parse_program, place_of_frames, with_place

from ._findings import findings_of
from ._flops import executed_flops, executions_of, flop_ledger
from ._ledger_records import Ledger
from ._memory_ledger import memory_of
from ._traffic import RAGGED, traffic_of
from ._work_rules import mark_kernels


def executions_in(folder: Path, compiled: Compiled) -> Executions:
    """Return the executions of the program in a `Compiled` folder. `compiled`: the record in that folder.

    Raises:
        ValueError: this version does not understand the compiler's text. The message names the line.
    """
    traced = compiled.traced_flops
    program = parse_program(read_text(folder, "program.hlo.txt"), _by_source if traced.by_source else None)
    if compiled.device_ids:
        from meshwright.hlo import joined_slices  # most fleets are one slice

        program = joined_slices(program, compiled.device_ids)
    mark_kernels(program, traced.kernels)
    return executions_of(program)


def _by_source(op_name: str, frames: Sequence[Frame]) -> str:
    return with_place(op_name, place_of_frames(frames))


def ledger_of(folder: Path, compiled: Compiled, fleet: Fleet, executions: Executions | None = None) -> Ledger:
    """Return the cost of one step of the compiled program on `fleet`.

    Args:
        folder: the `Compiled` folder with the compiler's texts.
        compiled: the record in that folder.
        fleet: the devices that the program runs on.
        executions: the executions of the folder's program, if the caller has parsed it already.

    Raises:
        ValueError: this version does not understand the compiler's text. The message names the line.
    """
    if executions is None:
        executions = executions_in(folder, compiled)
    executed = executed_flops(executions)
    flops = flop_ledger(compiled, executed)
    traffic, unpriced_traffic = traffic_of(executions, compiled.mesh_axes, fleet, compiled.coordinates)
    assignment, live_ranges = (
        read_text(folder, f"{name}.txt") for name in ("buffer-assignment", "live-range")
    )
    memory = memory_of(executions.program, assignment, live_ranges, compiled, fleet)
    unpriced = (*_counted(executed.unpriced), *_counted(unpriced_traffic))
    return Ledger(
        memory=memory,
        flops=flops,
        traffic=traffic,
        unpriced=(*compiled.traced_flops.unpriced, *unpriced),
        findings=findings_of(executions, compiled, fleet, memory, flops, traffic),
        assumptions=(
            *compiled.without_options,
            *_load_in_words(compiled.routing),
            *_dispatch_in_words(compiled.routing),
            *compiled.traced_flops.assumptions,
            *_counted(executed.assumptions),
            *((EQUAL_PARTS,) if any(each.kind == RAGGED for each in traffic) else ()),
        ),
    )


EQUAL_PARTS = (
    f"{RAGGED}: each device is taken to send equal parts of its operand to all of its group; one with more "
    "takes longer"
)


def _counted(entries: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{entry}, {n} times" if n > 1 else entry for entry, n in entries.items())


def _dispatch_in_words(routing: Routing | None) -> tuple[str, ...]:
    """Return how a token's row crosses to the fast domains of its experts, if there are several."""
    if routing is None or routing.domains == 1:
        return ()
    return (
        f"experts: a token's row crosses once to each of {routing.domains} fast domains that has any of its "
        "experts; expert_domains = 1 sends a row for each choice",
    )


def _load_in_words(routing: Routing | None) -> tuple[str, ...]:
    """Return what is assumed where one device's experts may get more tokens than others'; else nothing.

    No byte depends on the load: a compiled step has buffers of a fixed size. With a capacity factor they are
    all there is. Otherwise they hold an even share and a spare, and what exceeds them follows in rounds whose
    buffers the program has too (`contrib.experts`).
    """
    if routing is None or routing.ways == 1:  # with one, each device multiplies its own tokens alone
        return ()
    if routing.is_capped:
        what = (
            "experts: all places of the buffers of model.capacity_factor are sent and multiplied, filled or"
        )
        return (f"{what} not, so that no model.expert_load changes the step",)
    if routing.load == 1.0:
        return ("experts: every device gets as many tokens as another (model.expert_load = 1.0)",)
    whole = ", all of them" if routing.load == routing.ways else ""
    return (
        f"experts: one device gets {routing.load:g} times the mean of tokens{whole} (model.expert_load): the "
        "time of its experts and their messages is multiplied by that; tokens beyond the buffers follow in "
        "further rounds, whose memory is counted",
    )
