"""Find what the host of a trace of torch.profiler does that may hold its device up.

PyTorch's operations follow each other closely while a step is computed. Where a thread that runs them runs
none for longer, it does something else: the innermost function of Python around that time says what. On a GPU
the operations themselves are listed as launches, joined where they lie close.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ._recorded import HostSpan
from ._torch_names import (
    BACKWARD_CALL,
    COPY_CALL,
    MESSAGE,
    OPTIMIZER,
    STEP,
    SYNCHRONIZE,
    VIEWS,
    WAITS,
    bare,
)
from ._torch_threads import Span

LEAST_SHARE = 0.002  # of a step, that a pause between operations takes to be listed
SHORTEST_PAUSE, LONGEST_PAUSE = (
    2e-4,
    2e-3,
)  # seconds; what a busy host needs between two, and what always counts
EDGES = 0.05  # of a pause, that a function which fills it may miss
LEAST_COPY_SECONDS = 2e-5  # a call that only enqueues a copy takes less
LAUNCHES = "PyTorch's operations"
MOST_UNTIL_WORK = 0.05  # seconds after a wait, within which the device works again because of it


@dataclass(frozen=True, slots=True)
class Host:
    """The host of one process. `begins`: when its devices begin a kernel, in order; empty on a CPU."""

    threads: Mapping[str, list[Span]]
    rank: int
    step_seconds: float
    begins: Sequence[float] = ()

    def spans(self) -> list[HostSpan]:
        """Return what the threads do that run operations, apart from the operations themselves."""
        busy = {
            thread: spans
            for thread, spans in self.threads.items()
            if any(span.what != "python" for span in spans)  # others are monitors, for which no device waits
        }
        told = [
            self._listed(span, kind, thread)
            for thread, spans in busy.items()
            for span in spans
            if (kind := _kind(span))
        ]
        for thread, spans in busy.items():
            told += self._waits(spans, thread) if self.begins else self._numbers(spans, thread)
        return [*told, *self._pauses(busy, told)]

    def _listed(self, span: Span, kind: str, thread: str) -> HostSpan:
        return self._span(span.name, kind, thread, (span.begin, span.end), span.around.source)

    def _span(
        self, name: str, kind: str, thread: str, ends: tuple[float, float], source: str | None
    ) -> HostSpan:
        return HostSpan(
            name=name,
            kind=kind,
            rank=self.rank,
            thread=thread,
            begin_seconds=ends[0],
            seconds=ends[1] - ends[0],
            source=source,
        )

    @property
    def _pause(self) -> float:
        return min(max(LEAST_SHARE * self.step_seconds, SHORTEST_PAUSE), LONGEST_PAUSE)

    def _waits(self, spans: Iterable[Span], thread: str) -> Iterator[HostSpan]:
        """Yield the calls that wait for the device, each until the device works again."""
        for span in spans:
            if span.what != "call" or not (SYNCHRONIZE.fullmatch(span.name) or _copies_and_waits(span)):
                continue
            place = bisect.bisect_left(self.begins, span.end)
            until = self.begins[place] if place < len(self.begins) else span.end
            until = until if until - span.end < MOST_UNTIL_WORK else span.end
            operation = span.around.operation
            name = span.name if operation is None else operation.name
            yield self._span(name, "wait", thread, (span.begin, until), span.around.source)

    def _numbers(self, spans: Sequence[Span], thread: str) -> Iterator[HostSpan]:
        """Yield where numbers of tensors are read one after the other, for as long as a pause."""
        for run in _asked(spans):
            if run[-1].end - run[0].begin >= self._pause:
                ends = run[0].begin, run[-1].end
                yield self._span(run[0].name, "wait", thread, ends, run[0].around.source)

    def _pauses(self, threads: Mapping[str, list[Span]], told: Sequence[HostSpan]) -> Iterator[HostSpan]:
        """Yield the pauses between operations, and on a GPU the time in which they follow closely.

        Args:
            told: what is listed anyway, and is no pause.
        """
        spans = [span for each in threads.values() for span in each]
        operations = [(span.begin, span.end) for span in spans if _is_outermost(span)]
        if not operations:
            return
        listed = sorted((span.begin_seconds, span.end_seconds) for span in told)
        joined = _joined([*operations, *listed], self._pause)
        found = [_around(each, joined) for each in threads.values()]
        sent = _joined([(span.begin, span.end) for span in spans if MESSAGE.match(span.name)], 0.0)
        for ((_, begin), (end, _)), around in zip(
            itertools.pairwise(joined), zip(*found, strict=True), strict=True
        ):
            outer = max((each for each in around if each), key=lambda each: each.begin, default=None)
            if outer and BACKWARD_CALL.search(outer.name) and _meets((begin, end), sent):
                continue  # no Python runs there: an exchange of gradients is waited for
            name, source = (outer.name, outer.around.source) if outer else ("", None)
            yield self._span(name, "python", "", (begin, end), source)
        if self.begins:
            for ends in _without(joined, listed):
                yield self._span(LAUNCHES, "launch", "", ends, None)
            updates = [span for span in spans if OPTIMIZER.fullmatch(span.name)]
            for span in updates:  # innermost, and so the name of what is launched there
                for ends in _without([(span.begin, span.end)], listed):
                    yield self._span(span.name, "launch", "", ends, span.around.source)


def _kind(span: Span) -> str | None:
    """Return the kind of a span whose name tells it; None for another, or one within such a span."""
    if span.what == "call":
        if COPY_CALL.fullmatch(span.name):
            return None
        return "compile" if "ModuleLoad" in span.name or "GraphInstantiate" in span.name else None
    return span.opens


def _copies_and_waits(span: Span) -> bool:
    """Return whether a call copies, and does not return before."""
    return bool(COPY_CALL.fullmatch(span.name)) and span.end - span.begin >= LEAST_COPY_SECONDS


def _is_outermost(span: Span) -> bool:
    """Return whether a span is an operation within no other, which is part of the computation of a step."""
    return (
        span.what == "operation" and span.is_outermost and span.around.host_kind is None and _computes(span)
    )


def _asked(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield the operations that read numbers of tensors, as many as follow each other without another."""
    run: list[Span] = []
    for span in spans:
        if span.what == "operation" and span.is_outermost and bare(span.name) in WAITS:
            run.append(span)
        elif run and _is_outermost(span):
            yield run
            run = []
    if run:
        yield run


def _computes(span: Span) -> bool:
    """Return whether an operation, or one inside of it, does more than to view a tensor or read a number."""
    name = bare(span.name)
    if name in WAITS:
        return False
    inner = [child for child in span.children or () if child.what == "operation"]
    return any(map(_computes, inner)) if name in VIEWS else True


def _joined(spans: Iterable[tuple[float, float]], pause: float) -> list[tuple[float, float]]:
    """Return spans of time in order, joined where less than `pause` lies between two."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin - found[-1][1] < pause:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _meets(ends: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    """Return whether a span of time has a moment in common with one of `others`, which lie apart in order."""
    place = bisect.bisect_left(others, ends[1], key=lambda each: each[0])  # the first that begins after it
    return place > 0 and others[place - 1][1] > ends[0]


def _without(
    spans: Iterable[tuple[float, float]], holes: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    place = 0
    for begin, end in spans:
        at = begin
        while place < len(holes) and holes[place][0] < end:
            if holes[place][0] > at:
                yield at, holes[place][0]
            at = max(at, holes[place][1])
            place += 1
        if at < end:
            yield at, end


def _around(spans: Sequence[Span], joined: Sequence[tuple[float, float]]) -> list[Span | None]:
    """Return for each pause between two spans of time the innermost function or annotation that fills it.

    Args:
        spans: of a thread, in order.
    """
    found: list[Span | None] = []
    open_spans: list[Span] = []
    place = 0
    for (_, left), (right, _) in itertools.pairwise(joined):
        slack = EDGES * (right - left)
        begin, end = left + slack, right - slack
        while place < len(spans) and spans[place].begin <= begin:
            span = spans[place]
            while open_spans and open_spans[-1].end <= span.begin:
                open_spans.pop()
            if span.what == "python" or (span.what == "annotation" and not STEP.fullmatch(span.name)):
                open_spans.append(span)
            place += 1
        found.append(next((span for span in reversed(open_spans) if span.end >= end), None))
    return found
