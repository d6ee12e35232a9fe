"""Account for what a compiled program costs on each device: arithmetic, memory, traffic.

Imports: `compiler` (its record and texts), `hlo`, `hardware`, `formats`, `units`, `errors`. No jax, no clock.
Used by: `predict`, which walks the same `hlo.Program`, `reconciliation`, `planning`, `results`, `training`
(the allowance), `report`, `api`.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from meshwright.compiler import Compiled, read_text
from meshwright.hardware import Fleet
from meshwright.hlo import Executions, Frame, parse_program, place_of_frames, with_place

from ._findings import findings_of
from ._flops import executed_flops, flop_ledger
from ._flops import executions_of as executions_of
from ._flops import instruction_work as instruction_work
from ._library_calls import FOURIER as FOURIER
from ._library_calls import LINEAR_ALGEBRA as LINEAR_ALGEBRA
from ._memory import allowance as allowance
from ._memory import memory_of
from ._memory import usable_bytes as usable_bytes
from ._records import UNUSED as UNUSED
from ._records import Buffer as Buffer
from ._records import Collective as Collective
from ._records import Finding as Finding
from ._records import FlopLedger as FlopLedger
from ._records import Ledger as Ledger
from ._records import MemoryLedger as MemoryLedger
from ._records import Timeline as Timeline
from ._rules import CustomCall as CustomCall
from ._rules import MultiplyAdds as MultiplyAdds
from ._rules import left_dimensions as left_dimensions
from ._rules import mark_kernels as mark_kernels
from ._rules import register_call as register_call
from ._rules import registered_targets as registered_targets
from ._rules import traced_kernel_of as traced_kernel_of
from ._traffic import Message as Message
from ._traffic import is_overlapped as is_overlapped
from ._traffic import message_of as message_of
from ._traffic import split_channels as split_channels
from ._traffic import traffic_of as traffic_of


def executions_in(folder: Path, compiled: Compiled) -> Executions:
    """Return the executions of the program in a `Compiled` folder. `compiled`: the record in that folder.

    Raises:
        ValueError: this version does not understand the compiler's text. The message names the line.
    """
    traced = compiled.traced_flops
    program = parse_program(read_text(folder, "program.hlo.txt"), _by_source if traced.by_source else None)
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
            *compiled.traced_flops.assumptions,
            *_counted(executed.assumptions),
        ),
    )


def _counted(entries: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{entry}, {n} times" if n > 1 else entry for entry, n in entries.items())
