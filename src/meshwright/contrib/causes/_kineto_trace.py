"""Read traces of torch.profiler, one file for each process, as what they record: steps, work and the host.

Kernels, copies and messages of a GPU are its work. Where a trace has none, the CPU is the device: the
operations of PyTorch are the work, each without those inside of it, and what gloo sends.

Read: the format of PyTorch 1.8.1 to 2.13 (`export_chrome_trace`, `tensorboard_trace_handler`). Not read:
what accelerators other than CUDA's and ROCm's write, counters, memory events; they are counted.
"""

from __future__ import annotations

import bisect
import functools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.contrib.calibration import ChromeEvent, ChromeTrace
from meshwright.errors import InputError
from meshwright.hardware import LONGEST_STEP_SECONDS

from ._recorded import HostSpan, Recorded, RecordedStep, Work
from ._torch_host import Host
from ._torch_names import LAUNCH, OPTIMIZER, OTHER_MESSAGES, STEP, users_line
from ._torch_threads import Places, Span, nest
from ._torch_work import Kernel, cpu_work, device_work

AGAIN = "trace again, a few whole steps"
MOST_EVENTS = 12_000_000  # that are kept of one file; each takes some 200 bytes
KERNELS = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "kernel",
    "Kernel": "kernel",
    "Memcpy": "copy",
    "Memset": "kernel",
}  # fmt: skip  the last of PyTorch 1.8
SPANS = {
    "cpu_op": "operation", "Operator": "operation", "operator": "operation", "user_annotation": "annotation",
    "python_function": "python", "cuda_runtime": "call", "cuda_driver": "call", "Runtime": "call",
    "hip_runtime": "call", "hip_driver": "call", "overhead": "annotation", "python_gc": "annotation",
    "Python GC": "annotation",
}  # fmt: skip
SHOWN_ONLY = ("gpu_user_annotation", "Trace", "cuda_sync", "ac2g", "fwdbwd", "async", "async_gpu")
ANNOTATED = ("ProfilerStep", "enumerate(DataLoader)", "Optimizer.")  # as operations until PyTorch 1.12
OTHER_DEVICES = re.compile(r"(mtia|hpu|xpu|npu|privateuse1)\w*")
NO_STACKS = "it has no Python stacks, so lines and modules are not known: profile with with_stack=True"
NO_SHAPES = "it has no shapes: profile with record_shapes=True"
NO_BACKWARD = (
    "autograd records nothing in it: it is of a forward pass alone, and a step has a backward pass too"
)
NO_STEPS = "no ProfilerStep is in it: call the profiler's step() after each step"


@dataclass(slots=True)
class Detail:
    """Hold the fields of an operation's event, without its name."""

    sequence: int | None = None
    forward_thread: int = 0
    dims: Any = None
    types: Any = None
    line: str | None = None
    external: int | None = None


@dataclass(slots=True)
class Process:
    """The events of one file, which are those of one process."""

    trace: ChromeTrace
    rank: int = 0
    threads: dict[str, list[Span]] = field(default_factory=lambda: defaultdict[str, list[Span]](list))
    kernels: list[Kernel] = field(default_factory=list["Kernel"])
    unread: Counter[str] = field(default_factory=Counter[str])
    kept: int = 0
    num_ranks: int | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.trace.path

    @property
    def about(self) -> Mapping[str, Any]:
        """The fields of the file beside its events."""
        return self.trace.about


def kineto_trace(paths: Sequence[Path]) -> Recorded:
    """Return what traces of torch.profiler record, one file for each process of a run.

    Raises:
        InputError: a file is no such trace, a field of it cannot be, or two files are of the same rank.
    """
    processes = [_process(path) for path in paths]
    _give_ranks(processes)
    notes: list[str] = []
    steps: list[RecordedStep] = []
    work: list[Work] = []
    host: list[HostSpan] = []
    unread = Counter[str]()
    for process in sorted(processes, key=lambda each: each.rank):
        found_steps, found_work, found_host = _recorded_of(process, notes)
        steps += found_steps
        work += found_work
        host += found_host
        unread += process.unread
    kept = _steps_of_all(steps, notes)
    if len(kept) < len(steps):
        steps, spans = kept, _spans_by_rank(kept)
        work = [each for each in work if _is_in(each, spans[each.rank])]
        host = [each for each in host if _is_in(each, spans[each.rank])]
    world = max((p.num_ranks or 0 for p in processes), default=0)
    if world > len(processes):
        notes.append(f"{len(processes)} of the {world} ranks of the run are given")
    return Recorded(
        profiler="torch",
        files=tuple(str(path) for path in paths),
        steps=tuple(steps),
        work=tuple(sorted(work, key=lambda each: each.begin_seconds)),
        host=tuple(sorted(host, key=lambda each: each.begin_seconds)),
        num_ranks=len(processes),
        one_clock=_have_one_clock(processes),
        unread=dict(unread),
        notes=tuple(dict.fromkeys(notes)),
    )


def _process(path: Path) -> Process:
    process = Process(ChromeTrace(path))
    names: dict[str, str] = {}
    for event in process.trace:
        if event.text("ph") == "X":
            _keep(process, event, names)
        if process.kept > MOST_EVENTS:
            raise InputError(f"{path} has more than {MOST_EVENTS:,} events", hint="trace fewer steps")
    spans = sum(map(len, process.threads.values()))
    if not spans and not process.kernels:
        raise InputError(f"{path} holds no operation and no kernel of PyTorch", hint=AGAIN)
    _check_clock(process)
    _check_device(process)
    return process


def _keep(process: Process, event: ChromeEvent, names: dict[str, str]) -> None:
    kind = event.text("cat")
    what = SPANS.get(kind)
    if what is None and kind not in KERNELS:
        if kind not in SHOWN_ONLY:
            process.unread[f"events of the kind {kind[:40]!r}, which is not read"] += 1
        return
    begin, seconds = event.begin_seconds, event.seconds
    name = event.name
    name = names.setdefault(name, name)
    process.kept += 1
    if what is None:
        process.kernels.append(_kernel(event, KERNELS[kind], name, begin, seconds))
        return
    if what == "operation" and name.startswith(ANNOTATED):
        what = "annotation"
    detail = None
    if what == "operation" or (what == "annotation" and ":" in name):
        detail = _detail(event, names)
    elif what == "call":
        detail = _whole(event.args, "correlation")
    process.threads[event.identity("tid")].append(Span(what, name, begin, begin + seconds, detail))


def _whole(args: Mapping[str, Any], *keys: str) -> int | None:
    """Return a whole number of an event's arguments, under the first of the keys that is there."""
    value = next((args[key] for key in keys if key in args), None)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if type(value) is int else None


def _detail(event: ChromeEvent, texts: dict[str, str]) -> Detail:
    args = event.args
    stack = args.get("Call stack")
    return Detail(
        sequence=_whole(args, "Sequence number", "Fwd sequence number"),
        forward_thread=_whole(args, "Fwd thread id") or 0,
        dims=args.get("Input Dims", args.get("Input dims")),
        types=args.get("Input type"),
        line=_line_of(texts.setdefault(stack, stack)) if isinstance(stack, str) else None,
        external=_whole(args, "External id", "external id"),
    )


@functools.lru_cache(maxsize=2**14)
def _line_of(stack: str) -> str | None:
    """Return the innermost line of the user's in a call stack as PyTorch wrote it until 1.12."""
    return next((line for frame in stack.split(";") if (line := users_line(frame))), None)


def _kernel(event: ChromeEvent, what: str, name: str, begin: float, seconds: float) -> Kernel:
    args = event.args
    stream = args.get("stream", event.identity("tid"))
    is_message = "Collective name" in args or "nccl" in name.lower() or OTHER_MESSAGES.search(name)
    return Kernel(
        what=what,
        name=name,
        begin=begin,
        seconds=seconds,
        device=event.device,
        stream=str(stream)[:40],
        correlation=_whole(args, "correlation"),
        external=_whole(args, "External id", "external id"),
        num_bytes=_whole(args, "bytes"),
        message=dict(args) if is_message else None,
    )


def _check_device(process: Process) -> None:
    """Refuse a trace of a device whose own events are not there: its operations only launch."""
    if process.kernels:
        return
    others = [kind for kind in process.unread if OTHER_DEVICES.search(kind)]
    launches = sum(
        bool(LAUNCH.fullmatch(span.name))
        for spans in process.threads.values()
        for span in spans
        if span.what == "call"
    )
    if others or launches:
        what = others[0] if others else f"{launches:,} launches of kernels and no kernel"
        raise InputError(
            f"{process.path} has {what}, so what the device did is not known",
            hint="trace on a GPU with ProfilerActivity.CUDA, and see what the profiler printed about CUPTI",
        )


def _check_clock(process: Process) -> None:
    """Refuse events that lie farther apart than any trace is long: one of them has another clock."""
    begins = [span.begin for spans in process.threads.values() for span in spans]
    begins += [kernel.begin for kernel in process.kernels]
    apart = max(begins) - min(begins)
    if apart > LONGEST_STEP_SECONDS:
        raise InputError(f"{process.path}: its events lie {apart:.3g} s apart, which cannot be", hint=AGAIN)


def _give_ranks(processes: Sequence[Process]) -> None:
    """Number the processes as their files say, those that say nothing in the order of the files."""
    said: dict[int, Process] = {}
    for process in processes:
        info = process.about.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        rank, world = info.get("rank"), info.get("world_size")
        process.num_ranks = world if type(world) is int and 0 < world < 2**24 else None
        if type(rank) is not int or not 0 <= rank < 2**24:
            process.rank = -1
            continue
        if rank in said:
            raise InputError(
                f"{said[rank].path} and {process.path} are both of rank {rank}",
                hint="give one file of each rank, all of the same run",
            )
        process.rank = rank
        said[rank] = process
    worlds = {process.num_ranks: process for process in processes if process.num_ranks}
    if len(worlds) > 1:
        (one, first), (other, second), *_ = worlds.items()
        raise InputError(
            f"{first.path} is of a run of {one} ranks, and {second.path} of one of {other}",
            hint="give one file of each rank, all of the same run",
        )
    free = (number for number in range(len(processes) + len(said) + 1) if number not in said)
    for process in processes:
        if process.rank < 0:
            process.rank = next(free)


def _have_one_clock(processes: Sequence[Process]) -> bool:
    """Return whether times of different files may be compared: one host, one base of the clock."""
    clocks = {(str(p.about.get("host_name")), str(p.about.get("baseTimeNanoseconds"))) for p in processes}
    return len(processes) == 1 or (len(clocks) == 1 and "None" not in next(iter(clocks)))


def _recorded_of(process: Process, notes: list[str]) -> tuple[list[RecordedStep], list[Work], list[HostSpan]]:
    """Return steps, work and the host's spans of one process."""
    for spans in process.threads.values():
        nest(spans)
    places = Places(process.threads.values())
    if places.is_forward_alone:
        notes.append(NO_BACKWARD)
    work = (
        device_work(process.kernels, process.threads, places, process.rank)
        if process.kernels
        else cpu_work(process.threads, places, process.rank)
    )
    steps = _steps(process, work, notes)
    typical = statistics.median(step.seconds for step in steps)
    begins = sorted(kernel.begin for kernel in process.kernels)
    host = Host(process.threads, process.rank, typical, begins).spans()
    spans = [span for each in process.threads.values() for span in each]
    operations = [span for span in spans if span.what == "operation"]
    if not any(span.what == "python" for span in spans) and not any(op.detail.line for op in operations):
        notes.append(NO_STACKS)
    if operations and not any(op.detail.dims for op in operations):
        notes.append(NO_SHAPES)
    begin, end = steps[0].begin_seconds, steps[-1].end_seconds
    inside = [each for each in work if begin <= each.begin_seconds < end]
    if work and not inside:
        raise InputError(
            f"{process.path}: none of its {len(work):,} kernels lies within its steps: two clocks", hint=AGAIN
        )
    return steps, inside, [each for each in host if each.end_seconds > begin and each.begin_seconds < end]


def _steps(process: Process, work: Sequence[Work], notes: list[str]) -> list[RecordedStep]:
    """Return the steps: by `ProfilerStep#`, else by the optimizer's steps, else all as one.

    The device may run behind the host: a step begins when the host has begun it and the device has done all
    that was launched before.
    """
    spans = [s for each in process.threads.values() for s in each if s.what == "annotation"]
    marks = _begins(spans, STEP)
    last = max([mark[1] for mark in marks] + [each.end_seconds for each in work], default=0.0)
    if not marks:
        marks = _between_updates(spans)
        notes.append(NO_STEPS + ("; steps lie between its optimizer's" if marks else "; all is one step"))
        if marks:  # what follows the last update is no whole step
            *marks, (last, _, _) = marks
    if not marks:
        every = [s for each in process.threads.values() for s in each if s.what != "python"]
        marks = [(min([s.begin for s in every] + [w.begin_seconds for w in work]), 0.0, "")]
        last = max([s.end for s in every] + [w.end_seconds for w in work])
    edges = _behind([*(mark[0] for mark in marks), last], process, work)
    return [
        RecordedStep(rank=process.rank, index=index, begin_seconds=begin, end_seconds=end, name=mark[2])
        for index, (mark, begin, end) in enumerate(zip(marks, edges, edges[1:], strict=False))
        if index == 0 or index + 1 < len(marks) or any(each.begin_seconds >= begin for each in work)
    ]


def _steps_of_all(steps: Sequence[RecordedStep], notes: list[str]) -> list[RecordedStep]:
    """Return the steps that each rank has by name, with new numbers; all of them where they have no names.

    Raises:
        InputError: the ranks have no step in common, or different numbers of steps without names.
    """
    ranks = {rank: [step for step in steps if step.rank == rank] for rank in {step.rank for step in steps}}
    counts = {rank: len(mine) for rank, mine in ranks.items()}
    common = set[str].intersection(*({step.name for step in mine} for mine in ranks.values()))
    said = "; ".join(f"rank {rank} has {_said(mine)}" for rank, mine in sorted(ranks.items())[:4])
    if not common or (common == {""} and len({*counts.values()}) > 1):
        raise InputError(
            f"the ranks' files are not of the same steps: {said}",
            hint="give the files of one trace, made at the same time by each rank; or one rank's alone",
        )
    if common == {""}:
        return list(steps)
    kept = [
        replace(step, index=index)
        for mine in ranks.values()
        for index, step in enumerate(step for step in mine if step.name in common)
    ]
    if left := len(steps) - len(kept):
        notes.append(f"left out: {left} steps that not every rank has ({said})")
    return kept


def _said(steps: Sequence[RecordedStep]) -> str:
    named = [step.name for step in steps if step.name]
    return f"{named[0]} to {named[-1]}" if named else f"{len(steps)} steps"


def _spans_by_rank(steps: Sequence[RecordedStep]) -> Mapping[int, Sequence[tuple[float, float]]]:
    """Return when the steps of each rank begin and end, in order."""
    spans = defaultdict[int, list[tuple[float, float]]](list)
    for step in sorted(steps, key=lambda step: step.begin_seconds):
        spans[step.rank].append((step.begin_seconds, step.end_seconds))
    return spans


def _is_in(item: Work | HostSpan, spans: Sequence[tuple[float, float]]) -> bool:
    place = bisect.bisect_right(spans, item.begin_seconds, key=lambda span: span[0])
    return place > 0 and item.begin_seconds < spans[place - 1][1]


def _behind(edges: Sequence[float], process: Process, work: Sequence[Work]) -> list[float]:
    """Return when the device has done what the host had launched at each of the edges of steps."""
    launched: dict[str, float] = {}
    for spans in process.threads.values():
        launched.update((str(s.detail), s.begin) for s in spans if s.what == "call" and s.detail is not None)
    ends = sorted((launched[each.launch], each.end_seconds) for each in work if each.launch in launched)
    found: list[float] = []
    place, latest = 0, 0.0
    for edge in edges:
        while place < len(ends) and ends[place][0] < edge:
            latest = max(latest, ends[place][1]) if place else ends[place][1]
            place += 1
        found.append(max(edge, latest) if place else edge)
    return found


def _begins(spans: Iterable[Span], pattern: re.Pattern[str]) -> list[tuple[float, float, str]]:
    """Return begin, end and name of the annotations that a pattern names, each name once, in order."""
    found: dict[str, Span] = {}
    for span in spans:
        if pattern.fullmatch(span.name):
            before = found.setdefault(span.name, span)
            if span.end - span.begin > before.end - before.begin:
                found[span.name] = span
    return sorted((span.begin, span.end, span.name) for span in found.values())


def _between_updates(spans: Iterable[Span]) -> list[tuple[float, float, str]]:
    """Return the ends of the optimizer's steps; none where there are fewer than two."""
    updates = defaultdict[str, list[float]](list)
    for span in spans:
        if (found := OPTIMIZER.fullmatch(span.name)) and found[1] == "step":
            updates[span.name].append(span.end)
    if not updates:
        return []
    ends = sorted(max(updates.values(), key=len))
    return [(end, end, "") for end in ends] if len(ends) > 1 else []
