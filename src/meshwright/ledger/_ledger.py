"""The one function of the package: a `Compiled` folder and its fleet to a `Ledger`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from meshwright.compiler import Compiled, read_text
from meshwright.hardware import Fleet

from ._flops import ExecutedFlops, executed_flops
from ._lint import findings_of
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
    traffic, unpriced_traffic = traffic_of(program, compiled.mesh_axes, fleet, compiled.coordinates)
    memory, unexplained = memory_of(
        program,
        read_text(folder, "buffer-assignment.txt"),
        read_text(folder, "live-range.txt"),
        compiled,
        fleet,
    )
    flops = _flop_ledger(compiled, executed)
    return Ledger(
        memory=memory,
        flops=flops,
        traffic=traffic,
        unpriced=(
            *compiled.traced_flops.unpriced,
            *_counted(executed.unpriced),
            *unpriced_traffic,
            *unexplained,
        ),
        findings=findings_of(program, compiled, fleet, memory, flops, traffic),
        assumptions=_counted(executed.assumptions),
    )


def _counted(entries: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{entry}, {n} times" if n > 1 else entry for entry, n in entries.items())


def _flop_ledger(compiled: Compiled, executed: ExecutedFlops) -> FlopLedger:
    """One device's counts times the devices: every device runs the same program."""
    devices = compiled.num_devices
    by_phase = {phase: devices * flops for phase, flops in executed.by_phase.items() if flops}
    parameters, tokens = compiled.num_parameters, compiled.tokens_per_step
    rule_6nd = None if parameters is None or tokens is None else 6 * parameters * tokens
    traced, model = compiled.traced_flops.by_phase, compiled.traced_flops.by_module
    return FlopLedger(
        model=sum(flops for phase, flops in traced.items() if phase != "recompute"),
        executed=devices * executed.total,
        recomputed=by_phase.get("recompute", 0),
        by_phase=by_phase,
        by_format={name: devices * flops for name, flops in executed.by_format.items() if flops},
        by_module={module: devices * flops for module, flops in executed.by_module.most_common()},
        model_by_module=model,
        waste_by_module=_waste(model, {m: int(devices * n) for m, n in executed.first_by_module.items()}),
        rule_6nd=rule_6nd,
        bubble=int(devices * executed.bubble),
        elementwise_by_class={name: devices * n for name, n in executed.elementwise.most_common() if n},
    )


def _waste(model: dict[str, int], executed: dict[str, int]) -> dict[str, int]:
    """What is executed beyond the model, by the scope around a module's own, most first.

    Not by the module itself: where the compiler merges like products (queries and keys, say) it keeps the
    name of one of them. Nothing is known of a program compiled before its modules were counted.
    """
    if not model:
        return {}
    beyond: Counter[str] = Counter()
    for sign, counts in ((1, executed), (-1, model)):
        for module, flops in counts.items():
            beyond[module.rpartition("/")[0] or module] += sign * flops
    return {module: flops for module, flops in beyond.most_common() if flops > 0}
