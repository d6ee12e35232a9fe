"""The one function of the package: a `Compiled` folder and its fleet to a `Ledger`, and that as JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from meshwright.compiler import Compiled, read_text
from meshwright.hardware import Fleet

from ._flops import ExecutedFlops, executed_flops
from ._memory import memory_of
from ._records import FlopLedger, Ledger
from ._traffic import traffic_of
from .hlo import parse_program


def ledger_of(folder: Path, compiled: Compiled, fleet: Fleet) -> Ledger:
    """What one step of the compiled program costs on `fleet`.

    Raises:
        ValueError: text of the compiler that this version does not understand; the line is named.
    """
    program = parse_program(read_text(folder, "program.hlo.txt"))
    executed = executed_flops(program)
    traffic, unpriced_traffic = traffic_of(program, compiled.mesh_axes)
    memory, unexplained = memory_of(
        program,
        read_text(folder, "buffer-assignment.txt"),
        read_text(folder, "live-range.txt"),
        compiled,
        fleet,
    )
    counted = (f"{entry}, {n} times" if n > 1 else entry for entry, n in executed.unpriced.items())
    return Ledger(
        memory=memory,
        flops=_flop_ledger(compiled, executed),
        traffic=traffic,
        unpriced=(*compiled.traced_flops.unpriced, *counted, *unpriced_traffic, *unexplained),
    )


def ledger_dict(ledger: Ledger) -> dict[str, Any]:
    """The ledger as JSON's types: the `ledger` part of what `weigh --json` prints."""
    fields = dataclasses.asdict(ledger)
    fields["memory"]["allowance_bytes"] = ledger.memory.allowance_bytes
    fields["memory"]["fits"] = ledger.memory.fits
    return fields


def _flop_ledger(compiled: Compiled, executed: ExecutedFlops) -> FlopLedger:
    """One device's counts times the devices: every device runs the same program."""
    devices = compiled.num_devices
    by_phase = {phase: devices * flops for phase, flops in executed.by_phase.items() if flops}
    parameters, tokens = compiled.num_parameters, compiled.tokens_per_step
    rule_6nd = None if parameters is None or tokens is None else 6 * parameters * tokens
    traced = compiled.traced_flops.by_phase
    return FlopLedger(
        model=sum(flops for phase, flops in traced.items() if phase != "recompute"),
        executed=devices * executed.total,
        recomputed=by_phase.get("recompute", 0),
        by_phase=by_phase,
        by_format={name: devices * flops for name, flops in executed.by_format.items() if flops},
        rule_6nd=rule_6nd,
    )
