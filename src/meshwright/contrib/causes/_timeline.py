"""Divide the seconds of each recorded step among what its devices did, and what the host did meanwhile.

Each moment of a device in a step belongs to one thing. Kernels come before copies, copies before messages,
and messages before calls of the host, so that a message counts only while nothing hides it; what runs at once
shares the moment. A moment in which the device does nothing belongs to what the host does then: the most
telling span of it, with the innermost line of the user's code around it. The seconds are means over devices,
so they add up to those of the step exactly.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ._recorded import COMPUTE_KINDS, COPY_KINDS, MESSAGE_KINDS, UNKNOWN, HostSpan, Recorded, RecordedStep, Work

RANKS = {
    **dict.fromkeys((*COMPUTE_KINDS, UNKNOWN), 0),
    **dict.fromkeys(COPY_KINDS, 1),
    **dict.fromkeys(MESSAGE_KINDS, 2),
    "callback": 3,
}
"""By kind of work, which counts where several run at once: the lowest."""
TELLING = ("callback", "compile", "trace", "collect", "data", "save", "transfer", "launch", "python", "wait")
"""Kinds of the host's spans, the most telling first."""
IDLE = "idle"
INSIDE = "inside"  # of a run of the step's own program
NOTHING = "nothing"  # no span of the host was recorded


@dataclass(frozen=True, slots=True)
class Item:
    """What a part of a step belongs to.

    `kind`: one of `WORK_KINDS`, or `IDLE`. `name`: of the work; of the host's span while the device is idle.
    `host`: the kind of that span, or `INSIDE`, or `NOTHING`. `program`, `source`: as of `Work`.
    """

    kind: str
    name: str
    program: str = ""
    source: str | None = None
    host: str = ""


Parts = list[Counter[Item]]  # by index of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The seconds of each step by item, as a mean over devices, and those of each device by kind of work.

    `main`: the program of which each step runs one; "" where the trace names no programs.
    `by_device`: seconds of all steps by device and kind, with the step's index: what devices are compared by.
    `launches`: how many events of other programs than the main one run in all steps.
    """

    main: str
    parts: tuple[Counter[Item], ...]
    by_device: dict[str, list[Counter[str]]]
    launches: Counter[str]

    @property
    def step_seconds(self) -> list[float]:
        """The seconds of each step, as a mean over ranks."""
        return [sum(part.values()) for part in self.parts]


def stem(program: str) -> str:
    """Return the name of a program without the number by which the trace tells its compilations apart.

    >>> stem("jit_step(4)")
    'jit_step'
    """
    return program.partition("(")[0]


def timeline_of(recorded: Recorded) -> Timeline:
    """Return what each part of the recorded steps belongs to."""
    num_steps = min(len(recorded.steps_of(rank)) for rank in range(recorded.num_ranks))
    busy: Counter[str] = Counter()
    by_device: defaultdict[str, list[Work]] = defaultdict(list)
    for work in recorded.work:
        by_device[work.device].append(work)
        if work.run and work.program:
            busy[stem(work.program)] += work.seconds  # type: ignore[assignment]
    main = max(busy, key=lambda name: busy[name], default="")
    parts: Parts = [Counter() for _ in range(num_steps)]
    kinds = {device: [Counter[str]() for _ in range(num_steps)] for device in by_device}
    for device, works in by_device.items():
        rank = works[0].rank
        steps = recorded.steps_of(rank)[:num_steps]
        host = [span for span in recorded.host if span.rank == rank]
        idle: list[tuple[float, float, int, bool]] = []
        for index, begin, end, running in _moments(works, steps):
            if not running:
                idle.append((begin, end, index, _is_inside(begin, end, works, main)))
                continue
            share = (end - begin) / len(running) / len(by_device)
            for work in running:
                parts[index][_item(work)] += share  # type: ignore[assignment]
                kinds[device][index][work.kind] += (end - begin) / len(running)  # type: ignore[assignment]
        for index, seconds, item in _of_the_host(idle, host):
            parts[index][item] += seconds / len(by_device)  # type: ignore[assignment]
    launches = Counter(stem(w.program) for w in recorded.work if w.program and stem(w.program) != main)
    return Timeline(main=main, parts=tuple(parts), by_device=kinds, launches=launches)


def _item(work: Work) -> Item:
    return Item(kind=work.kind, name=work.instruction or work.name, program=work.program, source=work.source)


def _moments(
    works: Sequence[Work], steps: Sequence[RecordedStep]
) -> Iterator[tuple[int, float, float, list[Work]]]:
    """Yield each stretch of a device's steps in which the same works run: the step, its ends, and they.

    Of several kinds at once, only works of the first in `RANKS` are given.
    """
    marks: list[tuple[float, int, int]] = []  # when; 0 ends, 1 begins; the work's number, -1 for a step's edge
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
                yield index, before, now, [works[n] for n in sorted(running) if RANKS[works[n].kind] == lowest]
        before = now
        if number >= 0:
            (running.add if begins_here else running.discard)(number)


def _is_inside(begin: float, end: float, works: Sequence[Work], main: str) -> bool:
    """Return whether a gap lies within one run of the step's own program. `works` are in order of begin."""
    place = bisect.bisect_left(works, end, key=lambda work: work.begin_seconds)
    after = works[place] if place < len(works) else None
    before = works[place - 1] if place else None
    if before is None or after is None or not before.run:
        return False
    return before.run == after.run and before.program == after.program and stem(after.program) == main


def _of_the_host(
    idle: Iterable[tuple[float, float, int, bool]], spans: Sequence[HostSpan]
) -> Iterator[tuple[int, float, Item]]:
    """Yield what the seconds of a device's gaps belong to, by what the host does in them."""
    order = {kind: place for place, kind in enumerate(TELLING)}
    coming = sorted(spans, key=lambda span: span.begin_seconds)
    place, active = 0, list[HostSpan]()
    for begin, end, index, inside in idle:
        active = [span for span in active if span.end_seconds > begin]
        while place < len(coming) and coming[place].begin_seconds < end:
            if coming[place].end_seconds > begin:
                active.append(coming[place])
            place += 1
        cuts = {begin, end}
        for span in active:
            cuts |= {edge for edge in (span.begin_seconds, span.end_seconds) if begin < edge < end}
        edges = sorted(cuts)
        for left, right in zip(edges, edges[1:], strict=False):
            here = [span for span in active if span.begin_seconds <= left and span.end_seconds >= right]
            yield index, right - left, _idle_item(here, inside, order)


def _idle_item(here: Sequence[HostSpan], inside: bool, order: dict[str, int]) -> Item:
    """Return what a stretch of idle time belongs to. `here`: the spans that contain it."""
    if inside and not any(span.kind in ("callback", "collect") for span in here):
        return Item(kind=IDLE, name="", host=INSIDE)
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
    return Item(kind=IDLE, name=name, source=None if owner is None else owner.source, host=best.kind)
