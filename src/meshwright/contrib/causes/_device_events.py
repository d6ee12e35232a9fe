"""Turn the events of the devices in a trace of jax.profiler into work: its class, its program and its run.

On a CPU each event names its instruction and its run. On a GPU the kernels of a CUDA graph name the graph,
and no event names its run: runs are counted by what runs once in each. On a TPU the line "XLA Modules" has
the runs, and the names of events hold the text of their instructions.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.contrib.calibration import class_of_kernel

from ._recorded import MESSAGE_KINDS, UNKNOWN, Work, main_program, stem
from ._xplane_programs import Facts

DEVICE_PLANE, GPU_STREAM, MODULES = "/device:", "Stream", "XLA Modules"
KEPT_LINES = ("XLA Ops", "XLA Async Ops", "Async XLA Ops", GPU_STREAM, MODULES)
"""Name the lines of a device's plane that are read: its other lines repeat their events."""
CONTAINER = re.compile(r"(while|conditional|call|tuple)(\.|$)")
DONE = re.compile(r"-done(\.|$)")
INSTRUCTION = re.compile(r"%?([\w.\-]+)(?: = |$)")
FUSED = re.compile(r"copy|.*fusion|wrapped|loop|input")
COPIES = {
    "MemcpyD2H": "copy-to-host",
    "MemcpyH2D": "copy-to-device",
    "MemcpyD2D": "copy",
    "MemcpyP2P": "copy",
}

_FactsByName = Mapping[str, Mapping[str, Facts]]  # by program


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a trace, of whichever format. `begin` is in seconds on the clock of the trace."""

    rank: int
    plane: str
    line: str
    name: str
    begin: float
    seconds: float
    stats: Mapping[str, Any]


def works_of(events: Sequence[Event], facts: Mapping[str, dict[str, Facts]]) -> list[Work]:
    """Return the work of the devices of one host, each with the run of its program where that is known."""
    named = {program: {**_kernel_names(table), **table} for program, table in facts.items()}
    modules = [event for event in events if event.line == MODULES and event.plane.startswith(DEVICE_PLANE)]
    by_plane: defaultdict[str, list[Event]] = defaultdict(list)
    for module in sorted(modules, key=lambda event: event.begin):
        by_plane[module.plane].append(module)
    works = [work for event in events if (work := _work_of(event, named, by_plane)) is not None]
    return works if any(work.run for work in works) else list(_with_runs(works))


def _kernel_names(table: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return the facts by the names that XLA gives to the kernels of fusions: without points and hyphens."""
    return {re.sub(r"\W", "_", name): each for name, each in table.items() if each.is_work}


def _work_of(event: Event, facts: _FactsByName, modules: Mapping[str, Sequence[Event]]) -> Work | None:
    """Return the work that an event is; None for one of the host, or one that contains others."""
    stats, name = event.stats, str(event.stats.get("hlo_op", ""))
    on_device = event.plane.startswith(DEVICE_PLANE)
    if (not name and not on_device) or event.line == MODULES:
        return None
    on_gpu = on_device and event.line.startswith(GPU_STREAM)
    if not name and not on_gpu and (match := INSTRUCTION.match(event.name)):
        name = match[1]
    module = str(stats.get("hlo_module", ""))
    program = f"{module}({stats['program_id']})" if "program_id" in stats else module
    run = str(stats.get("run_id", ""))
    if not run and (inside := _module_at(event, modules.get(event.plane, ()))) is not None:
        program, run = program or inside.name, f"{inside.begin:.9f}"
    program, said = _facts_at(facts, program, name, event.name)
    if said is None and not on_gpu and (CONTAINER.match(name) or DONE.search(name)):
        return None
    if said is not None and not said.is_work:
        return None
    copied = next((kind for start, kind in COPIES.items() if event.name.startswith(start)), None)
    device = str(stats.get("device_ordinal", "")) or event.plane.rpartition(":")[2]
    return Work(
        name=event.name,
        kind=copied or (said.kind if said is not None else _kind_by_name(name, event.name)),
        rank=event.rank,
        device=f"{event.rank}/{device}",
        stream=event.line,
        begin_seconds=event.begin,
        seconds=event.seconds,
        instruction=name or None,
        program=program,
        run=run,
        launch=str(stats.get("correlation_id", "")),
        **({} if said is None else _words(said)),
    )


def _module_at(event: Event, modules: Sequence[Event]) -> Event | None:
    place = bisect.bisect_right(modules, event.begin, key=lambda module: module.begin) - 1
    inside = modules[place] if place >= 0 else None
    return inside if inside is not None and event.begin < inside.begin + inside.seconds else None


def _facts_at(facts: _FactsByName, program: str, name: str, kernel: str) -> tuple[str, Facts | None]:
    """Return the program of an event by the name that the trace gives its text, and what that says of it.

    A trace may not tell which compilation of a program ran, and numbers one from jax's cache differently.
    """
    names = [program] if program in facts else []
    names += [key for key in facts if program and key != program and stem(key) == stem(program)]
    for key in names:
        for each in (name, kernel):
            if each in facts[key]:
                return key, facts[key][each]
    return program, None


def _words(facts: Facts) -> dict[str, Any]:
    names = ("source", "scope", "phase", "recomputed", "format_name", "shape", "flops", "num_bytes", "group")
    return {name: getattr(facts, name) for name in names}


def _kind_by_name(instruction: str, kernel: str) -> str:
    """Return the kind of an event by the names of its instruction and its kernel."""
    if instruction.startswith("ragged-all-to-all"):
        return "all-to-all"
    for kind in MESSAGE_KINDS:
        if instruction.startswith(kind):
            return kind
    if "callback" in instruction:
        return "callback"
    if instruction.startswith(("dot", "ynn_fusion", "gemm")):
        return "matmul"
    if instruction.startswith("convolution"):
        return "convolution"
    by_kernel = class_of_kernel(kernel) or class_of_kernel(instruction)
    fused = FUSED.match(instruction) or FUSED.match(kernel)
    return by_kernel or ("memory-bound" if fused else UNKNOWN)


def _with_runs(works: Iterable[Work]) -> Iterator[Work]:
    """Yield works with the number of the run that they belong to, where no event names its own.

    Runs are counted by the event that comes least often and begins first: an instruction outside of loops, or
    a CUDA graph, whose kernels share a launch.
    """
    every = list(works)
    main = main_program(replace(work, run="0") for work in every if work.program)
    begins: dict[str, list[float]] = {}
    for device in sorted({work.device for work in every}):
        first: dict[tuple[str, str], float] = {}
        for work in every:
            if work.device == device and stem(work.program) == main:
                key = work.instruction or work.name, work.launch or f"{work.begin_seconds}"
                first[key] = min(first.get(key, work.begin_seconds), work.begin_seconds)
        occurrences: defaultdict[str, list[float]] = defaultdict(list)
        for (name, _), begin in first.items():
            occurrences[name].append(begin)
        if occurrences:
            once = min(occurrences.values(), key=lambda times: (len(times), min(times)))
            begins[device] = sorted(once)
    for work in every:
        if stem(work.program) == main and work.device in begins:
            number = bisect.bisect_right(begins[work.device], work.begin_seconds)
            yield replace(work, run=str(number)) if number else work
        else:
            yield work
