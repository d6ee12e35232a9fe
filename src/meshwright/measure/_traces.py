"""Read a trace of a run: the seconds of a step, and of each class of work in it, on one device.

Two forms are read. An XPlane file is what `jax.profiler` writes; its events name instructions of the compiled
program, so the program tells the class of each. On a GPU XLA launches most kernels in CUDA graphs. Their
events name the graph and the kernel: a kernel that XLA wrote has the name of a fusion, and that of a library
tells its class. A Kineto file is what `torch.profiler` writes as Chrome's trace events; a kernel's class
follows from its name.

The seconds of a class are the sum over its events, divided by devices and steps. So they are what one device
takes: simulated devices of a CPU run side by side on shared cores, and each event lasts as long as sharing
makes it last, as in a prediction. The exposed seconds of classes add up: what several kernels of one device
run at once is shared among them, and a message counts only while no kernel runs. A step lasts from the begin
of its first event on any device to the end of its last; gaps are those in which a device runs no event. The
host's time between steps is in none of them.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import statistics
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..hardware import COLLECTIVE_KINDS

LEAST_MATCHED = 0.8
"""The share of a trace's kernel time that must be matched with the program, or the trace is refused."""
GAPS = "launch"
MOST_NAMED = 3
MICROSECOND, NANOSECOND = 1e-6, 1e-9
XPLANE = ".xplane.pb"
HINT = "give an .xplane.pb file, a folder that jax.profiler wrote, or a .json or .json.gz of torch.profiler"
# By class, what the names of its kernels hold; the first that is found counts.
KERNEL_NAMES = {
    "all-gather": r"nccl.*AllGather",
    "reduce-scatter": r"nccl.*ReduceScatter",
    "all-reduce": r"nccl.*AllReduce",
    "all-to-all": r"nccl.*(AllToAll|SendRecv)",
    "attention": r"flash|fmha|attention|sdpa|cudnn::fusion::(compute_dot_do_o|convert_dq)",
    "convolution": r"conv(?!ert)|wgrad2d|dgrad2d|winograd",
    "matmul": r"gemm|cutlass|nvjet|cublas|splitK|s16816|s1688|xmma",
    "memory-bound": r"memcpy|memset",
}
MESSAGES = (*COLLECTIVE_KINDS, "collective-permute")
PROFILER_STEP = re.compile(r"ProfilerStep#\d+")
GPU_PLANE = "/device:GPU:"
GRAPH = re.compile(r"command_buffer(_\d+)?")  # XLA's word for a CUDA graph


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One kernel or message of a trace.

    `name`: of the instruction or of the CUDA graph; in a trace of torch.profiler, of the kernel. `run`: which
    repeat. `kernel`: of a GPU, its own name. `launch`: the launch of a GPU's kernel or of its graph.
    """

    name: str
    module: str
    device: str
    run: str
    begin_seconds: float
    seconds: float
    kernel: str = ""
    launch: str = ""


_Classed = tuple[TraceEvent, str]  # an event with its class of work, "" if none is known


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step of a trace on one device: its seconds, and those of each class of work.

    `seconds_by_class`: whole events. `exposed_by_class`: without what other classes hide; with gaps they sum
    to the step.
    `matched`: the share of the kernels' seconds that has a class. `unmatched`: the seconds of the largest
    events without one, by name. `num_steps`: the steps of the trace. The step of median length is taken
    where the trace tells its steps apart, else their mean.
    """

    seconds: float
    seconds_by_class: dict[str, float]
    exposed_by_class: dict[str, float]
    matched: float
    unmatched: dict[str, float]
    num_steps: int
    num_devices: int


def xplane_files(path: Path) -> tuple[Path, ...]:
    """Return the newest XPlane files below a folder, one for each host, or the file itself.

    Raises:
        InputError: there are none.
    """
    if path.is_file():
        return (path,)
    found = sorted(path.rglob(f"*{XPLANE}"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise InputError(f"{path} holds no file that ends in {XPLANE}", hint=HINT)
    return tuple(file for file in found if file.parent == found[-1].parent)


def is_xplane(path: Path) -> bool:
    """Return whether a path is an XPlane file or a folder; otherwise it is taken for Kineto's JSON.

    Raises:
        InputError: nothing is there, or a file of another kind.
    """
    if not path.exists():
        raise InputError(f"no trace at {path}", hint=HINT)
    if path.is_dir() or path.name.endswith(XPLANE):
        return True
    if not path.name.endswith((".json", ".json.gz")):
        raise InputError(f"{path} is no trace by its name", hint=HINT)
    return False


def xplane_events(path: Path) -> Iterator[TraceEvent]:
    """Yield the events of XPlane files that name an instruction of a compiled program.

    Raises:
        InputError: a file cannot be read.
    """
    from jax.profiler import ProfileData  # lazily: reading a record needs no jax

    for number, file in enumerate(xplane_files(path)):
        try:
            planes = list(ProfileData.from_serialized_xspace(file.read_bytes()).planes)
        except Exception as broken:  # the parser's own kinds differ by release
            raise InputError(f"{file} cannot be read as a trace: {broken}", hint=HINT) from broken
        for plane in planes:
            for line in plane.lines:
                for event in line.events:
                    stats = _stats_of(event)
                    if "hlo_op" not in stats:
                        continue
                    device = stats.get("device_ordinal", plane.name)
                    yield TraceEvent(
                        name=str(stats["hlo_op"]),
                        module=f"{stats.get('hlo_module', '')} {stats.get('program_id', '')}",
                        device=f"{number} {device}",
                        run=str(stats.get("run_id", "")),
                        begin_seconds=event.start_ns * NANOSECOND,
                        seconds=event.duration_ns * NANOSECOND,
                        kernel=event.name if plane.name.startswith(GPU_PLANE) else "",
                        launch=str(stats.get("correlation_id", "")),
                    )


def _stats_of(event: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        # Python 3.13 warns when jaxlib makes the type of these pairs; as an error that ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {name: value for name, value in event.stats if name is not None}


def traced_step(
    events: Iterable[TraceEvent], classes: Mapping[str, str], others: Collection[str], once: Collection[str]
) -> TracedStep:
    """Return a step of the program whose instructions `classes` names, with the seconds of each class.

    Of several programs in a trace, the one counts of which most seconds are matched.

    Args:
        classes: the class of work of each kernel and message, by instruction.
        others: instructions whose events only hold those of others, or take no time: loops, calls, waits.
        once: instructions that run once in a step, by which steps are counted if no event names its run.

    Raises:
        InputError: there is no event, or less than `LEAST_MATCHED` of the seconds is matched.
    """
    kernels = {re.sub(r"\W", "_", name): kind for name, kind in classes.items()}
    by_module: defaultdict[str, list[_Classed]] = defaultdict(list)
    for event in events:
        if event.name not in others:
            by_module[event.module].append((event, _class_of(event, classes, kernels)))

    if not by_module:
        raise InputError(
            "the trace names no kernel of a compiled program",
            hint="on a GPU the profiler needs CUPTI, and permission to read counters: see what it printed "
            "while the steps ran; or give the seconds of a step: --measured",
        )

    def known_seconds(module: str) -> float:
        return sum(event.seconds for event, kind in by_module[module] if kind)

    chosen = by_module[max(by_module, key=known_seconds)]
    matched = _checked_share(chosen)
    usual, span, num_steps, num_inside = _usual_step([(e, kind) for e, kind in chosen if kind], once)
    return _step_of(
        usual,
        span,
        num_inside,
        matched=matched,
        unmatched=_largest(chosen),
        num_steps=num_steps,
    )


def _class_of(event: TraceEvent, classes: Mapping[str, str], kernels: Mapping[str, str]) -> str:
    """Return the class of an event, or "" if neither its instruction nor its kernel tells it.

    XLA names a kernel by its fusion, with an underscore for each other sign, and uses one kernel for all
    fusions that are alike.
    """
    if event.name in classes or not event.kernel:
        return classes.get(event.name, "")
    return kernels.get(event.kernel) or _kernel_class(event.kernel) or ""


def _step_of(events: Collection[_Classed], span: float, num_inside: int, **facts: Any) -> TracedStep:
    """Return the step of events with their classes, of which `num_inside` steps of `span` seconds consist."""
    num_devices = len({event.device for event, _ in events})
    share = 1 / num_devices / num_inside
    whole: defaultdict[str, float] = defaultdict(float)
    for event, kind in events:
        whole[kind] += event.seconds * share
    exposed = {kind: seconds * share for kind, seconds in _exposed(events).items()}
    gaps = span - sum(exposed.values())
    between = {GAPS: gaps} if gaps > 0 else {}
    return TracedStep(
        seconds=span,
        seconds_by_class={**whole, **between},
        exposed_by_class={**exposed, **between},
        num_devices=num_devices,
        **facts,
    )


def _exposed(events: Iterable[_Classed]) -> dict[str, float]:
    """Return the seconds in which each class runs, summed over devices.

    What kernels of one device run at once is shared among them; messages count while no kernel runs.
    """
    by_device: defaultdict[str, list[tuple[float, int, str]]] = defaultdict(list)
    for event, kind in events:
        begin = event.begin_seconds
        by_device[event.device] += [(begin, 1, kind), (begin + event.seconds, -1, kind)]
    seconds: defaultdict[str, float] = defaultdict(float)
    for marks in by_device.values():
        running: Counter[str] = Counter()
        before = 0.0
        for now, change, kind in sorted(marks):
            counted = {name: n for name, n in running.items() if n > 0 and name not in MESSAGES}
            counted = counted or {name: n for name, n in running.items() if n > 0}
            for name, number in counted.items():
                seconds[name] += (now - before) * number / sum(counted.values())
            running[kind] += change
            before = now
    return dict(seconds)


def _checked_share(events: Collection[_Classed]) -> float:
    total = sum(event.seconds for event, _ in events)
    matched = sum(event.seconds for event, kind in events if kind)
    if total == 0 or matched / total < LEAST_MATCHED:
        share = 100 * matched / total if total else 0
        named = ", ".join(_largest(events)) or "none"
        raise InputError(
            f"{share:.0f} % of the trace's kernel time is matched with the program, less than "
            f"{100 * LEAST_MATCHED:.0f} %; the largest events without a match: {named}",
            hint="give the config, the layout and the fleet with which the traced run was made",
        )
    return matched / total


def _largest(events: Iterable[_Classed]) -> dict[str, float]:
    """Return the seconds of the largest events without a class, by name."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for event, kind in events:
        if not kind:
            seconds[event.kernel or event.name] += event.seconds
    largest = sorted(seconds, key=lambda name: -seconds[name])[:MOST_NAMED]
    return {name: seconds[name] for name in largest}


def _usual_step(
    events: Collection[_Classed], once: Collection[str]
) -> tuple[Collection[_Classed], float, int, int]:
    """Return the events of the step of median length, its seconds, and the number of steps.

    Where no event names its run, all events are returned, with the mean step. The last number is how many
    steps the returned events are of.
    """
    by_run: defaultdict[str, list[_Classed]] = defaultdict(list)
    for event, kind in events:
        by_run[event.run].append((event, kind))
    if "" not in by_run:
        ranked = sorted(by_run.values(), key=_span)
        usual = ranked[(len(ranked) - 1) // 2]
        return usual, _span(usual), len(ranked), 1
    num_steps = _count_steps([event for event, _ in events], once)
    return events, _span(events) / num_steps, num_steps, num_steps


def _count_steps(events: Collection[TraceEvent], once: Collection[str]) -> int:
    """Return how many steps a trace holds, by what runs once in a step: an instruction, or a CUDA graph.

    A graph inside a loop is launched several times in a step, so the one with the fewest launches counts.

    Raises:
        InputError: nothing is known to run once.
    """
    counts = Counter((event.device, event.name) for event in events if event.name in once)
    if counts:
        return int(statistics.median(counts.values()))
    launches: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for event in events:
        if GRAPH.fullmatch(event.name):
            launches[event.device, event.name].add(event.launch)
    if not launches:
        raise InputError(
            "the trace does not tell its steps apart: no event names its run, and none runs once in a step",
            hint="trace whole steps; or give the seconds of a step: --measured",
        )
    return min(len(each) for each in launches.values())


def _span(events: Iterable[_Classed]) -> float:
    ends = [(event.begin_seconds, event.begin_seconds + event.seconds) for event, _ in events]
    return max(end for _, end in ends) - min(begin for begin, _ in ends)


def kineto_step(path: Path) -> TracedStep:
    """Return a step of a trace of torch.profiler, with the seconds of each class of kernel by its name.

    Kernels that no name tells are memory-bound, as most of what remains is; `unmatched` names the largest.
    `ProfilerStep#` events delimit the steps; without them the whole trace is one step. Kernels belong to the
    steps together: the device runs behind the host.

    Raises:
        InputError: the file is no such trace, or has no kernels.
    """
    events = _chrome_events(path)
    steps = {str(e["name"]) for e in events if PROFILER_STEP.fullmatch(str(e.get("name", "")))}
    kernels = [
        TraceEvent(
            name=str(event["name"]),
            module="",
            device=str(event.get("args", {}).get("device", event.get("pid"))),
            run="",
            begin_seconds=float(event["ts"]) * MICROSECOND,
            seconds=float(event["dur"]) * MICROSECOND,
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    if not kernels:
        raise InputError(
            f"{path} has no GPU kernels", hint="trace with ProfilerActivity.CUDA, and export_chrome_trace"
        )
    num_steps = max(1, len(steps))
    named = [(kernel, _kernel_class(kernel.name) or "") for kernel in kernels]
    known = sum(kernel.seconds for kernel, kind in named if kind)
    classed = [(kernel, kind or "memory-bound") for kernel, kind in named]
    return _step_of(
        classed,
        _span(classed) / num_steps,
        num_steps,
        matched=known / sum(kernel.seconds for kernel in kernels),
        unmatched=_largest(named),
        num_steps=num_steps,
    )


@functools.cache  # a trace has thousands of events of one name
def _kernel_class(name: str) -> str | None:
    for kind, pattern in KERNEL_NAMES.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return None


def _chrome_events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.name.endswith(".gz") else raw
        found = json.loads(text)
        events = found["traceEvents"] if isinstance(found, dict) else found
        return [event for event in events if isinstance(event, dict)]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error) as broken:
        raise InputError(f"{path} cannot be read as Chrome trace events: {broken}", hint=HINT) from broken
