"""Read a trace of jax.profiler: XPlane files, or its JSON for Perfetto, of one host or of many.

An XPlane file holds the compiled programs too, so each kernel is known by its instruction: its class, its
line in the user's code, its scope and its number format. The JSON has the names of instructions alone.

The steps are the runs of the program in which the devices are busiest, each with what follows until the next
run begins. Where `StepTraceAnnotation` says that a step is several runs, its spans are the steps. The
last step is left out if there are others, since nothing tells when it ends.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.contrib.calibration import ChromeEvent, ChromeTrace, stats_of, xplane_files, xplane_planes
from meshwright.errors import InputError
from meshwright.files import read_bytes
from meshwright.hardware import LONGEST_STEP_SECONDS
from meshwright.units import format_bytes

from ._device_events import DEVICE_PLANE, KEPT_LINES, Event, works_of
from ._host_names import FRAME, SLEEP, is_of_a_library, kind_of_function, kind_of_name
from ._recorded import HostSpan, Recorded, RecordedStep, Work, main_program, stem
from ._xplane_programs import Facts, facts_of, parsed, program_texts

MOST_BYTES = 2**28  # of one file, whose events take ten times as much memory
MOST_EVENTS = 3_000_000  # of one file: half a minute of a processor
NANOSECOND = 1e-9
FEWER = "trace fewer steps: three to ten are enough; or turn the Python tracer off"
AGAIN = "trace again, a few whole steps, with jax.profiler.trace(folder)"
SHORTEST_SPAN = 1e-6  # of Python's functions: shorter ones hold nothing up


@dataclass(slots=True)
class _Reading:
    """Collect what the files of a trace say while they are read."""

    work: list[Work] = field(default_factory=list[Work])
    host: list[HostSpan] = field(default_factory=list[HostSpan])
    marks: list[RecordedStep] = field(default_factory=list[RecordedStep])
    programs: dict[str, str] = field(default_factory=dict[str, str])
    facts: dict[str, dict[str, Facts]] = field(default_factory=dict[str, dict[str, Facts]])
    unread: Counter[str] = field(default_factory=Counter[str])
    has_frames: bool = False


def jax_trace(paths: Iterable[Path]) -> Recorded:
    """Return what a trace of jax.profiler says.

    Args:
        paths: a folder of the profiler, its `.xplane.pb` files, or `.json(.gz)` files; each file is one host.

    Raises:
        InputError: a file cannot be read or is too large, or no device did any work in it.
    """
    files = tuple(file for path in paths for file in _files(path))
    if len({_is_json(file) for file in files}) > 1:
        raise InputError(
            "the trace's files are of two kinds, which would be counted twice",
            hint="name the .xplane.pb files alone: they hold more than the JSON",
        )
    found = _Reading()
    for rank, file in enumerate(files):
        _read_host(file, rank, found)
    if not found.work:
        raise InputError(
            f"{files[0]}: no device did any work in it, in {len(files)} file{'s' if len(files) > 1 else ''}",
            hint="trace while steps run, and wait for the last one before the trace ends: "
            "jax.block_until_ready(result); on a GPU the profiler needs CUPTI",
        )
    return _recorded(found, files)


def _files(path: Path) -> tuple[Path, ...]:
    files = xplane_files(path)
    for file in files:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise InputError(
                f"{file} has {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}", hint=FEWER
            )
    return files


def _is_json(file: Path) -> bool:
    return file.name.endswith((".json", ".json.gz"))


def _read_host(file: Path, rank: int, found: _Reading) -> None:
    """Add the events of one host."""
    if not _is_json(file):
        try:
            texts = program_texts(read_bytes(file, MOST_BYTES))
        except ValueError as broken:
            raise InputError(f"{file} is cut short: {broken}", hint=AGAIN) from broken
        for name, text in texts.items():
            if (program := parsed(text)) is None:
                found.unread["programs whose text this version does not understand"] += 1
            else:
                found.programs[name] = text
                found.facts[name] = facts_of(program)
    read = _json_events(file, rank) if _is_json(file) else _plane_events(file, rank)
    events = list(itertools.islice(_possible_events(read, found), MOST_EVENTS + 1))
    if len(events) > MOST_EVENTS:
        raise InputError(f"{file} has more than {MOST_EVENTS:,} events", hint=FEWER)
    found.work += works_of(events, found.facts)
    by_line: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if not event.plane.startswith(DEVICE_PLANE) and "hlo_op" not in event.stats:
            by_line[event.plane, event.line].append(event)
    for line in by_line.values():
        _read_thread(line, found)


def _plane_events(file: Path, rank: int) -> Iterator[Event]:
    for _, _, plane in xplane_planes(file):
        for line in plane.lines:
            if plane.name.startswith(DEVICE_PLANE) and not line.name.startswith(KEPT_LINES):
                continue
            for event in line.events:
                if event.name.startswith(("ThreadpoolListener", "end: ")):
                    continue
                yield Event(
                    rank=rank,
                    plane=plane.name,
                    line=line.name,
                    name=event.name,
                    begin=event.start_ns * NANOSECOND,
                    seconds=event.duration_ns * NANOSECOND,
                    stats=stats_of(event),
                )


def _json_events(file: Path, rank: int) -> Iterator[Event]:
    """Yield the events of Chrome's JSON. Names of processes and threads may come behind their events."""
    names: dict[tuple[str, str], str] = {}
    found: list[tuple[str, str, ChromeEvent]] = []
    for event in ChromeTrace(file):
        process, thread = event.identity("pid"), event.identity("tid")
        if event.text("ph") == "M" and event.text("name") in ("process_name", "thread_name"):
            key = process, thread if event.text("name") == "thread_name" else ""
            names[key] = str(event.args.get("name", ""))
        elif event.text("ph") == "X" and not event.text("name").startswith("end: "):
            found.append((process, thread, event))
    for process, thread, event in found:
        plane, line = names.get((process, ""), process), names.get((process, thread), thread)
        if not plane.startswith(DEVICE_PLANE) or line.startswith(KEPT_LINES):
            yield Event(
                rank=rank,
                plane=plane,
                line=line,
                name=event.text("name"),
                begin=event.begin_seconds,
                seconds=event.seconds,
                stats=event.args,
            )


def _possible_events(events: Iterable[Event], found: _Reading) -> Iterator[Event]:
    for event in events:
        if not math.isfinite(event.begin) or not math.isfinite(event.seconds):
            found.unread["events without a time"] += 1
        elif event.seconds < 0 or event.begin < 0:
            found.unread["events that begin or last less than nothing"] += 1
        elif event.seconds > LONGEST_STEP_SECONDS:
            found.unread["events longer than any step"] += 1
        else:
            yield event


def _read_thread(events: list[Event], found: _Reading) -> None:
    """Add what one thread of the host did, with the user's function around each event as its source."""
    events.sort(key=lambda event: (event.begin, -event.seconds))
    inside: list[tuple[float, HostSpan | None, bool]] = []  # end, the user's function, whether in a library
    for event in events:
        end = event.begin + event.seconds
        while inside and inside[-1][0] <= event.begin:
            inside.pop()
        if "step_num" in event.stats:
            step = RecordedStep(
                rank=event.rank, index=0, begin_seconds=event.begin, end_seconds=end, name=event.name
            )
            found.marks.append(step)
            continue
        owner = next((span for _, span, _ in reversed(inside) if span is not None), None)
        in_library = bool(inside) and inside[-1][2]
        frame = FRAME.match(event.name)
        found.has_frames |= frame is not None
        span = None
        is_library = in_library
        if frame is not None and not is_of_a_library(frame["place"]):
            kind = kind_of_function(frame["function"])
            if owner is not None and kind == "python" and owner.kind in ("data", "save"):
                kind = owner.kind  # what a loader calls is the loader's time
            span = _span(event, kind, frame["function"], frame["place"])
            is_library = False
        elif event.name == SLEEP or not in_library or kind_of_name(event.name) is not None:
            span, is_library = _inner_span(event, owner), in_library or frame is not None
        if span is not None and (span.kind != "python" or span.seconds >= SHORTEST_SPAN):
            found.host.append(span)
        mine = span if frame is not None and not is_library else None
        inside.append((end, mine, is_library))


def _inner_span(event: Event, owner: HostSpan | None) -> HostSpan | None:
    """Return the span of an event that is no function of the user's: his function calls it, if one does."""
    source = None if owner is None else owner.source
    if event.name == SLEEP:
        kind = "python" if owner is None or owner.kind not in ("data", "save") else owner.kind
        inside = "" if owner is None else f" in {owner.name}"
        return _span(event, kind, f"time.sleep{inside}", source)
    kind = kind_of_name(event.name)
    if kind is None and event.name == "$builtins next":
        kind = "data"
    if kind is None:
        return None
    if owner is not None and owner.kind in ("data", "save"):
        return _span(event, owner.kind, owner.name, source)
    return _span(event, kind, event.name.lstrip("$"), source)


def _span(event: Event, kind: str, name: str, source: str | None) -> HostSpan:
    return HostSpan(
        name=name,
        kind=kind,
        rank=event.rank,
        thread=event.line,
        begin_seconds=event.begin,
        seconds=event.seconds,
        source=source,
    )


def _recorded(found: _Reading, files: tuple[Path, ...]) -> Recorded:
    """Return the record of all hosts: the steps, and what lies within them."""
    main = main_program(found.work)
    steps = [
        step
        for rank in range(len(files))
        for step in _steps_of(
            rank,
            [work for work in found.work if work.rank == rank],
            sorted((m for m in found.marks if m.rank == rank), key=lambda m: m.begin_seconds),
            main,
        )
    ]
    counts = Counter(step.rank for step in steps)
    if len(set(counts.values())) > 1 or len(counts) < len(files):
        said = ", ".join(f"{counts[rank]} of {file.name}" for rank, file in enumerate(files))
        raise InputError(
            f"the hosts' files hold different numbers of steps: {said}",
            hint="give the files of one trace, made at the same time on each host; or one host's alone",
        )
    spans = {r: (min(s.begin_seconds for s in steps if s.rank == r),
                 max(s.end_seconds for s in steps if s.rank == r)) for r in counts}  # fmt: skip

    def within(item: Work | HostSpan) -> bool:
        begin, end = spans[item.rank]
        return item.end_seconds > begin and item.begin_seconds < end

    notes = [] if found.has_frames else ["no functions of Python: the lines of the host's time are not known"]
    if not found.programs:
        notes.append("no compiled programs: kernels are known by the names of their instructions alone")
    key: Callable[[Work | HostSpan], tuple[int, float]] = lambda item: (item.rank, item.begin_seconds)  # noqa: E731
    return Recorded(
        profiler="jax",
        files=tuple(map(str, files)),
        steps=tuple(steps),
        work=tuple(sorted(filter(within, found.work), key=key)),
        host=tuple(sorted(filter(within, found.host), key=key)),
        num_ranks=len(files),
        programs=found.programs,
        unread=found.unread,
        notes=tuple(notes),
    )


def _steps_of(rank: int, works: list[Work], marks: list[RecordedStep], main: str) -> list[RecordedStep]:
    """Return the steps of one host: the runs of its main program, or the spans of annotations."""
    begins: dict[str, float] = {}
    end = max((work.end_seconds for work in works), default=0.0)
    last: dict[str, float] = {}
    for work in works:
        if work.run and stem(work.program) == main:
            begins[work.run] = min(begins.get(work.run, math.inf), work.begin_seconds)
            last[work.run] = max(last.get(work.run, 0.0), work.end_seconds)
    starts, name = sorted(begins.values()), ""
    if marks and len(starts) != len(marks) and (not starts or len(starts) >= 2 * len(marks) - 1):
        starts, name = [mark.begin_seconds for mark in marks], marks[0].name
    if not starts:
        begin = min((work.begin_seconds for work in works), default=0.0)
        return [RecordedStep(rank=rank, index=0, begin_seconds=begin, end_seconds=end)] if works else []
    ends = [*starts[1:], max(last.values(), default=end)]
    steps = [
        RecordedStep(rank=rank, index=index, begin_seconds=begin, end_seconds=finish, name=name)
        for index, (begin, finish) in enumerate(zip(starts, ends, strict=True))
    ]
    return steps[:-1] or steps
