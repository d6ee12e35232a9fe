"""Build the `Ledger` of a compiled program from its `Compiled` folder and its fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from meshwright.compiler import Compiled, read_text
from meshwright.hardware import Fleet
from meshwright.hlo import Executions, parse_program

from ._flops import ExecutedFlops, executed_flops, executions_of, first_runs, shared_out
from ._lint import findings_of
from ._memory import memory_of
from ._records import FlopLedger, Ledger
from ._traffic import traffic_of


def executions_in(folder: Path) -> Executions:
    """Return the executions of the program in a `Compiled` folder.

    Raises:
        ValueError: this version does not understand the compiler's text. The message names the line.
    """
    return executions_of(parse_program(read_text(folder, "program.hlo.txt")))


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
        executions = executions_in(folder)
    executed = executed_flops(executions)
    traffic, unpriced_traffic = traffic_of(executions, compiled.mesh_axes, fleet, compiled.coordinates)
    memory = memory_of(
        executions.program,
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
        ),
        findings=findings_of(executions, compiled, fleet, memory, flops, traffic),
        assumptions=(*compiled.without_options, *_counted(executed.assumptions)),
    )


def _counted(entries: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{entry}, {n} times" if n > 1 else entry for entry, n in entries.items())


def _flop_ledger(compiled: Compiled, executed: ExecutedFlops) -> FlopLedger:
    """Multiply one device's counts by the number of devices, as every device runs the same program."""
    devices, traced = compiled.num_devices, compiled.traced_flops
    parameters, tokens = compiled.num_parameters, compiled.tokens_per_step
    counts, merged = (
        Counter({key: devices * flops for key, flops in each.items()})
        for each in (executed.by_phase_and_module, executed.merged)
    )
    shared = shared_out(counts, merged, traced.by_phase_and_module)
    by_phase = Counter({phase: devices * flops for phase, flops in executed.by_phase.items() if flops})
    first = Counter({module: int(devices * flops) for module, flops in executed.first_by_module.items()})
    only = first_runs(shared, traced.by_phase_and_module)
    if only:
        by_phase["forward"] += only.total()
        by_phase["recompute"] -= only.total()
        first += only
    by_module: Counter[str] = Counter()
    for (_, module), flops in shared.items():
        by_module[module] += flops
    return FlopLedger(
        model=sum(flops for phase, flops in traced.by_phase.items() if phase != "recompute"),
        executed=devices * executed.total,
        recomputed=by_phase["recompute"],
        by_phase={phase: flops for phase, flops in by_phase.items() if flops},
        by_format={name: devices * flops for name, flops in executed.by_format.items() if flops},
        by_module=dict(by_module.most_common()),
        model_by_module=traced.by_module,
        waste_by_module=_waste(traced.by_module, first),
        rule_6nd=None if parameters is None or tokens is None else 6 * parameters * tokens,
        bubble=int(devices * executed.bubble),
        elementwise_by_class={name: devices * n for name, n in executed.elementwise.most_common() if n},
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
