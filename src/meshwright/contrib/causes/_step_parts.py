"""Divide the seconds of each recorded step among what its devices did, and what the host did meanwhile.

Each moment of a device in a step belongs to one thing. Kernels come before copies, copies before messages,
and messages before calls of the host, so that a message counts only while nothing hides it; what runs at once
shares the moment. A moment in which the device does nothing belongs to what the host does then: the most
telling span of it, with the innermost line of the user's code around it. The seconds are means over devices,
so they add up to those of the step exactly.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ._recorded import (
    COMPUTE_KINDS,
    COPY_KINDS,
    MESSAGE_KINDS,
    UNKNOWN,
    HostSpan,
    Recorded,
    RecordedStep,
    Work,
    main_program,
    stem,
)

RANKS = {
    **dict.fromkeys((*COMPUTE_KINDS, UNKNOWN), 0),
    **dict.fromkeys(COPY_KINDS, 1),
    **dict.fromkeys(MESSAGE_KINDS, 2),
    "callback": 3,
}
"""By kind of work, which counts where several run at once: the lowest."""
TELLING = ("callback", "compile", "trace", "collect", "data", "save", "transfer", "launch", "wait", "python")
"""Kinds of the host's spans, the most telling first."""
IDLE = "idle"
INSIDE = "inside"  # of a run of the step's own program
OTHERS = "others"  # another device works, or the step's program is launched and begins late
NOTHING = "nothing"  # no span of the host was recorded
HOLDING = {INSIDE: ("callback", "collect"), OTHERS: ("callback", "collect", "compile", "trace", "transfer")}
"""What the host does that holds the program up all the same: a launch may compile it or copy arguments."""


@dataclass(frozen=True, slots=True)
class Item:
    """Name the work, or the wait of the host, to which a part of a step belongs.

    `kind`: one of `WORK_KINDS`, or `IDLE`. `name`: of the work; of the host's span while the device is idle.
    `host`: the kind of that span, or `INSIDE`, `OTHERS` or `NOTHING`. The other fields: as of `Work`.
    """

    kind: str
    name: str
    program: str = ""
    source: str | None = None
    host: str = ""
    phase: str | None = None
    recomputed: bool = False
    format_name: str | None = None


@dataclass(frozen=True, slots=True)
class _Idle:
    """A piece of a device's idle time in a step. `held_by`: what holds the device up; "" for the host."""

    index: int
    begin: float
    end: float
    held_by: str


Parts = list[defaultdict[Item, float]]  # by index of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The seconds of each step by item, as a mean over devices, and those of each device by kind of work.

    `main`: the program of which each step runs one; "" where the trace names no programs.
    `by_device`: seconds of all steps by device and kind, with the step's index: what devices are compared by.
    `launches`: how many events of other programs than the main one run in all steps.
    `exposed`: seconds of the mean step for which nothing hides a message, by the `id` of its work.
    """

    main: str
    parts: tuple[Mapping[Item, float], ...]
    by_device: Mapping[str, Sequence[Mapping[str, float]]]
    launches: Counter[str]
    exposed: Mapping[int, float]

    @property
    def step_seconds(self) -> list[float]:
        """The seconds of each step, as a mean over ranks."""
        return [sum(part.values()) for part in self.parts]


def timeline_of(recorded: Recorded) -> Timeline:
    """Return what each part of the recorded steps belongs to."""
    ranks = sorted({step.rank for step in recorded.steps})  # one file may be that of rank 3 alone
    num_steps = min(len(recorded.steps_of(rank)) for rank in ranks)
    by_device: defaultdict[str, list[Work]] = defaultdict(list)
    for work in recorded.work:
        by_device[work.device].append(work)
    main = main_program(recorded.work)
    parts: Parts = [defaultdict(float) for _ in range(num_steps)]
    kinds: dict[str, list[defaultdict[str, float]]] = {
        device: [defaultdict(float) for _ in range(num_steps)] for device in by_device
    }
    exposed: defaultdict[int, float] = defaultdict(float)
    for rank in ranks:
        mine = {device: works for device, works in by_device.items() if works[0].rank == rank}
        steps = recorded.steps_of(rank)[:num_steps]
        host = [span for span in recorded.host if span.rank == rank]
        name = f"PjitFunction({main.removeprefix('jit_')})"
        launches = sorted(span.begin_seconds for span in host if span.name == name)
        busy = _busy(mine.values()) if len(mine) > 1 else []
        for device, works in mine.items():
            owners = _owners([work for work in works if main and stem(work.program) != main], host)
            idle: list[_Idle] = []
            for index, begin, end, running in moments(works, steps):
                if not running:
                    idle += _gaps(index, begin, end, works, main, launches, busy)
                    continue
                share = (end - begin) / len(running)
                for work in running:
                    item = owners.get(id(work)) or item_of(work)
                    parts[index][item] += share / len(by_device)
                    kinds[device][index][work.kind] += share
                    if work.kind in MESSAGE_KINDS:
                        exposed[id(work)] += share / len(by_device) / num_steps
            for index, seconds, item in _of_the_host(idle, host):
                parts[index][item] += seconds / len(by_device)
    launches = Counter(stem(w.program) for w in recorded.work if w.program and stem(w.program) != main)
    return Timeline(main=main, parts=tuple(parts), by_device=kinds, launches=launches, exposed=exposed)


def item_of(work: Work) -> Item:
    """Return what the seconds of a work belong to."""
    return Item(
        kind=work.kind,
        name=work.instruction or work.name,
        program=work.program,
        source=work.source,
        phase=work.phase,
        recomputed=work.recomputed,
        format_name=work.format_name,
    )


def _owners(works: Sequence[Work], spans: Sequence[HostSpan]) -> dict[int, Item]:
    """Return the items of works without a line of their own: the user's function that runs as they begin."""
    sourced = sorted((span for span in spans if span.source is not None), key=lambda span: span.begin_seconds)
    place, active = 0, list[HostSpan]()
    found: dict[int, Item] = {}
    for work in works:
        while place < len(sourced) and sourced[place].begin_seconds <= work.begin_seconds:
            active.append(sourced[place])
            place += 1
        active = [span for span in active if span.end_seconds >= work.begin_seconds]
        named = [span for span in active if span.kind in ("python", "data", "save")] or active
        source = named[-1].source if named else work.source
        name = work.instruction or work.name
        found[id(work)] = Item(kind=work.kind, name=name, program=work.program, source=source)
    return found


def moments(
    works: Sequence[Work], steps: Sequence[RecordedStep]
) -> Iterator[tuple[int, float, float, list[Work]]]:
    """Yield each stretch of a device's steps in which the same works run: the step, its ends, and they.

    Of several kinds at once, only works of the first in `RANKS` are given.
    """
    marks: list[
        tuple[float, int, int]
    ] = []  # when; 0 ends, 1 begins; the work's number, -1 for a step's edge
    for number, work in enumerate(works):
        if work.seconds > 0:
            marks += [(work.begin_seconds, 1, number), (work.end_seconds, 0, number)]
    edges = {edge for step in steps for edge in (step.begin_seconds, step.end_seconds)}
    marks += [(edge, 0, -1) for edge in edges]
    marks.sort()
    begins = [step.begin_seconds for step in steps]
    running: set[int] = set()
    before = 0.0
    for now, begins_here, number in marks:
        if now > before:
            index = bisect.bisect_right(begins, before) - 1
            if index >= 0 and before < steps[index].end_seconds:
                lowest = min((RANKS[works[n].kind] for n in running), default=0)
                yield (
                    index,
                    before,
                    now,
                    [works[n] for n in sorted(running) if RANKS[works[n].kind] == lowest],
                )
        before = now
        if number >= 0:
            (running.add if begins_here else running.discard)(number)


def _gaps(
    index: int,
    begin: float,
    end: float,
    works: Sequence[Work],
    main: str,
    launches: Sequence[float],
    busy: Sequence[tuple[float, float]],
) -> Iterator[_Idle]:
    """Yield a gap of a device in pieces, each with what holds the device up, if it is not the host.

    `launches`: when the host launches the step's own program. Within a run of it, it is the program. From its
    launch to its first kernel, and while another device of the process works, the host has done its part.
    """
    place = bisect.bisect_left(works, end, key=lambda work: work.begin_seconds)
    after = works[place] if place < len(works) else None
    before = works[place - 1] if place else None
    is_main = bool(main) and after is not None and stem(after.program) == main
    if is_main and after and before and before.run and before.run == after.run:
        yield _Idle(index, begin, end, INSIDE)
        return
    latest = bisect.bisect_left(launches, end) - 1
    launched = launches[latest] if is_main and latest >= 0 and launches[latest] >= begin else end
    for left, right, is_busy in _split(begin, launched, busy):
        yield _Idle(index, left, right, OTHERS if is_busy else "")
    if launched < end:
        yield _Idle(index, launched, end, OTHERS)


def _busy(devices: Iterable[Sequence[Work]]) -> list[tuple[float, float]]:
    """Return the spans of time in which any of the devices works, in order and apart."""
    found: list[tuple[float, float]] = []
    for work in sorted((work for works in devices for work in works), key=lambda work: work.begin_seconds):
        if found and work.begin_seconds <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], work.end_seconds)
        else:
            found.append((work.begin_seconds, work.end_seconds))
    return found


def _split(
    begin: float, end: float, busy: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, bool]]:
    """Yield the parts of a span of time, each with whether it lies in one of `busy`."""
    place = bisect.bisect_right(busy, begin, key=lambda span: span[1])
    while begin < end:
        left, right = busy[place] if place < len(busy) else (end, end)
        if begin < left:
            yield begin, min(left, end), False
        if left < end and left < right:
            yield max(begin, left), min(right, end), True
        begin, place = max(begin, min(right, end)), place + 1
        if left >= end:
            return


def _of_the_host(idle: Iterable[_Idle], spans: Sequence[HostSpan]) -> Iterator[tuple[int, float, Item]]:
    """Yield what the seconds of a device's gaps belong to, by what the host does in them."""
    order = {kind: place for place, kind in enumerate(TELLING)}
    coming = sorted(spans, key=lambda span: span.begin_seconds)
    place, active = 0, list[HostSpan]()
    for piece in idle:
        index, begin, end = piece.index, piece.begin, piece.end
        active = [span for span in active if span.end_seconds > begin]
        while place < len(coming) and coming[place].begin_seconds < end:
            if coming[place].end_seconds > begin:
                active.append(coming[place])
            place += 1
        cuts = {begin, end}
        for span in active:
            cuts |= {edge for edge in (span.begin_seconds, span.end_seconds) if begin < edge < end}
        edges = sorted(cuts)
        for left, right in itertools.pairwise(edges):
            here = [span for span in active if span.begin_seconds <= left and span.end_seconds >= right]
            yield index, right - left, _idle_item(here, piece.held_by, order)


def _idle_item(here: Sequence[HostSpan], held_by: str, order: dict[str, int]) -> Item:
    """Return what a stretch of idle time belongs to. `here`: the spans that contain it."""
    if held_by and not any(span.kind in HOLDING[held_by] for span in here):
        return Item(kind=IDLE, name="", host=held_by)
    if not here:
        return Item(kind=IDLE, name="", host=NOTHING)
    best = min(here, key=lambda span: (order[span.kind], -span.begin_seconds))
    sourced = [span for span in here if span.source is not None]
    inner = max(sourced, key=lambda span: span.begin_seconds, default=None)
    owner = best if best.source is not None else inner
    if owner is not None and best.kind in ("launch", "transfer", "wait", "compile", "trace"):
        named = [span for span in sourced if span.kind in ("python", "data", "save")]
        owner = max(named, key=lambda span: span.begin_seconds, default=owner)
    name = best.name if owner is None else owner.name
    source = None if owner is None else owner.source
    return Item(kind=IDLE, name=name, program=_launched(here), source=source, host=best.kind)


def _launched(here: Iterable[HostSpan]) -> str:
    """Return the program that jax launches in one of the spans, by the name that the program has."""
    names = (span.name for span in here if span.name.startswith("PjitFunction("))
    return next((f"jit_{name[len('PjitFunction(') : -1]}" for name in names), "")
