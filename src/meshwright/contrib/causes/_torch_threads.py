"""Find what surrounds each event of the host in a trace of torch.profiler: module, line, phase, operation.

The events of a thread nest: functions of Python hold operations, operations hold others, and the innermost
one launches a kernel. The backward pass runs without Python's stack, often on a thread of its own; the
sequence number of an operation joins it with the operation of the forward pass that asked for it. Each
operation shows the number that the next node of autograd gets; the last to show it is the one that made it.

What the checkpoint of activations runs again is known by its sequence numbers: only operations that autograd
records have one, and inside the backward pass nothing is recorded but what runs the forward pass again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ._recorded import OUTSIDE as NO_PHASE
from ._torch_names import (
    BACKWARD,
    ENGINE,
    MODULE,
    OPTIMIZER,
    STEP,
    annotation_kind,
    function_kind,
    users_line,
)


class Span:
    """One event of a thread. `what`: operation | annotation | python | call (of the driver or the runtime).

    `detail`: of an operation a `Detail`, of a call its correlation.
    """

    __slots__ = ("around", "begin", "children", "detail", "end", "is_outermost", "name", "opens", "what")
    detail: Any

    def __init__(self, what: str, name: str, begin: float, end: float, detail: Any = None) -> None:
        self.what, self.name, self.begin, self.end, self.detail = what, name, begin, end, detail
        self.around: Around = OUTSIDE
        self.is_outermost = True  # an operation within no other
        self.children: list[Span] | None = None  # of operations
        self.opens: str | None = None  # the kind of what the host does, if it is not within such a span


class Call:
    """One call of an outermost module, and whether autograd records it."""

    __slots__ = ("is_recorded",)

    def __init__(self) -> None:
        self.is_recorded = False


@dataclass(frozen=True, slots=True)
class Around:
    """Hold the events around an event, itself included.

    outermost: the operation that is within no other. modules: from the outermost, "Block_0".
    source: the innermost line of the user's. sequence: of the node of autograd whose backward is running.
    host_kind: data, compile, save or collect. annotation: the innermost one that is none of PyTorch's own.
    """

    operation: Span | None = None
    modules: tuple[str, ...] = ()
    source: str | None = None
    is_backward: bool = False
    sequence: int | None = None
    is_recomputed: bool = False
    outermost: Span | None = None
    optimizer: str = ""
    host_kind: str | None = None
    annotation: str = ""
    call: Call | None = None


OUTSIDE = Around()


@dataclass(frozen=True, slots=True)
class Place:
    """Where work of the device comes from."""

    scope: str | None
    source: str | None
    phase: str | None
    is_recomputed: bool


def nest(spans: list[Span]) -> None:
    """Put the spans of one thread in order, and give each its surroundings."""
    spans.sort(key=lambda span: (span.begin, -span.end))
    open_spans: list[Span] = []
    for span in spans:
        while open_spans and open_spans[-1].end <= span.begin:
            open_spans.pop()
        outer = open_spans[-1] if open_spans else None
        span.around = _around(span, outer.around if outer else OUTSIDE)
        if outer is None or outer.around.host_kind is None:
            span.opens = span.around.host_kind
        if outer is not None:
            span.is_outermost = outer.around.operation is None
            holder = outer.around.operation
            if holder is not None and span.what in ("operation", "annotation") and holder is not span:
                _hold(holder, span)
        open_spans.append(span)


def _hold(holder: Span, span: Span) -> None:
    if holder.children is None:
        holder.children = []
    holder.children.append(span)


def _around(span: Span, outer: Around) -> Around:
    if span.what == "python":
        return _around_function(span, outer)
    if span.what == "annotation":
        return _around_annotation(span, outer)
    return _around_operation(span, outer) if span.what == "operation" else outer


def _around_function(span: Span, outer: Around) -> Around:
    if span.name.startswith(MODULE):
        modules = (*outer.modules, span.name[len(MODULE) :])
        return replace(outer, modules=modules, call=outer.call or Call())
    line, kind = users_line(span.name), function_kind(span.name)
    kind = None if outer.host_kind or kind == "wait" else kind
    if line is None and kind is None:
        return outer
    return replace(outer, source=line or outer.source, host_kind=kind or outer.host_kind)


def _around_annotation(span: Span, outer: Around) -> Around:
    if STEP.fullmatch(span.name):
        return outer
    if found := OPTIMIZER.fullmatch(span.name):
        return replace(outer, optimizer=found[2])
    kind = outer.host_kind or annotation_kind(span.name)
    return replace(outer, host_kind=kind, annotation=span.name)


def _around_operation(span: Span, outer: Around) -> Around:
    sequence, line = span.detail.sequence, span.detail.line
    outermost = outer.outermost or span
    if span.name.startswith(ENGINE) or (BACKWARD.fullmatch(span.name) and not outer.is_backward):
        return replace(
            outer,
            operation=span,
            outermost=outermost,
            is_backward=True,
            sequence=sequence,
            is_recomputed=False,
        )
    again = outer.is_backward and sequence is not None and not span.detail.forward_thread
    return replace(
        outer,
        operation=span,
        outermost=outermost,
        source=line or outer.source,
        is_recomputed=outer.is_recomputed or (again and sequence != outer.sequence),
    )


class Places:
    """Tell where the work of a process comes from, by the operations of all of its threads.

    `is_forward_alone`: autograd records nothing, so modules are the forward pass (as in inference).
    """

    def __init__(self, threads: Iterable[list[Span]]) -> None:
        self._forward: dict[int, Around] = {}
        self._texts: dict[tuple[str, ...], str] = {}
        self._recorded: set[int] = set()
        operations = [[span for span in spans if span.what == "operation"] for spans in threads]
        self._find_forward(operations)
        outermost = [[span for span in spans if span.is_outermost] for spans in operations]
        ends = sorted(span.begin for spans in outermost for span in spans if _ends_forward(span.around))
        for spans in outermost:
            self._fill(spans, ends)

    def _find_forward(self, operations: Iterable[list[Span]]) -> None:
        """Find the operations that autograd recorded: those whose backward runs, or all where none does."""
        asked: set[int | None] = set()
        shown: dict[int, Span] = {}
        for spans in operations:
            for span in spans:
                number = span.detail.sequence
                if span.around.is_backward and not span.around.is_recomputed:
                    asked.add(span.around.sequence)
                elif number is not None:
                    shown[number] = span
        self.is_forward_alone = not asked and not shown
        for number, span in shown.items():
            if number in asked or not asked:
                self._forward[number] = span.around
                self._record(span.around)

    def _record(self, around: Around) -> None:
        if around.is_backward or around.outermost is None:
            return
        self._recorded.add(id(around.outermost))
        if around.call is not None:
            around.call.is_recorded = True

    def _fill(self, outermost: list[Span], ends: list[float]) -> None:
        """Count what lies between two recorded operations without a module around it to the forward pass.

        Args:
            ends: when a backward pass or an update runs, on any thread.
        """
        between: list[Span] = []
        begin = math.inf  # of the last operation that is recorded
        for span in outermost:
            if bisect.bisect_left(ends, span.begin) > bisect.bisect_left(ends, begin):
                between, begin = [], math.inf
            if id(span) in self._recorded:
                self._recorded.update(map(id, between))
                between, begin = [], span.begin
            elif begin < span.begin and span.around.call is None:
                between.append(span)

    def of(self, around: Around) -> Place:
        """Return the place of work that an event with these surroundings launches or does."""
        asked = around
        if around.is_backward and not around.is_recomputed:
            asked = self._forward.get(-1 if around.sequence is None else around.sequence, OUTSIDE)
        scope = self._texts.setdefault(asked.modules, "/".join(asked.modules)) if asked.modules else None
        return Place(scope, asked.source, self._phase(around), around.is_recomputed)

    def _phase(self, around: Around) -> str | None:
        if around.optimizer:
            return "optimizer"
        if around.is_backward:
            return "backward"
        records = id(around.outermost) in self._recorded or (around.call and around.call.is_recorded)
        records = records or (self.is_forward_alone and around.call is not None)
        return "forward" if records else None if around.operation is None else NO_PHASE


def _ends_forward(around: Around) -> bool:
    return around.is_backward or bool(around.optimizer)
