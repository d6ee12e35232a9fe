"""Find what surrounds each event of the host in a trace of torch.profiler: module, line, phase, operation.

The events of a thread nest: functions of Python hold operations, operations hold others, and the innermost
one launches a kernel. The backward pass runs without Python's stack, often on a thread of its own; the
sequence number of an operation joins it with the operation of the forward pass that asked for it.

What the checkpoint of activations runs again is known by its sequence numbers: only operations that autograd
records have one, and inside the backward pass nothing is recorded but what runs the forward pass again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ._torch_names import (
    ENGINE,
    MODULE,
    OPTIMIZER,
    STEP,
    annotation_kind,
    function_kind,
    users_line,
)

NO_SEQUENCE = 2**64 - 1  # of AccumulateGrad


class Span:
    """One event of a thread. `what`: operation | annotation | python | call (of the driver or the runtime).

    `detail`: of an operation a `Detail`, of a call its correlation.
    """

    __slots__ = ("around", "begin", "children", "detail", "end", "is_outermost", "name", "what")
    detail: Any

    def __init__(self, what: str, name: str, begin: float, end: float, detail: Any = None) -> None:
        self.what, self.name, self.begin, self.end, self.detail = what, name, begin, end, detail
        self.around: Around = OUTSIDE
        self.is_outermost = True  # an operation within no other
        self.children: list[Span] | None = None  # of operations


class Call:
    """One call of an outermost module, and whether autograd records it."""

    __slots__ = ("is_recorded",)

    def __init__(self) -> None:
        self.is_recorded = False


@dataclass(frozen=True, slots=True)
class Around:
    """What surrounds an event, itself included.

    modules: from the outermost, "Block_0". source: the innermost line of the user's. sequence: of the node of
    autograd whose backward is running. host_kind: data, compile, save or collect, and `host` the name.
    annotation: the innermost one that is none of PyTorch's own.
    """

    operation: Span | None = None
    modules: tuple[str, ...] = ()
    source: str | None = None
    is_backward: bool = False
    sequence: int | None = None
    is_recomputed: bool = False
    is_recorded: bool = False
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
    sequence, forward_thread, line = span.detail.sequence, span.detail.forward_thread, span.detail.line
    if span.name.startswith(ENGINE):
        return replace(
            outer, operation=span, is_backward=True, sequence=sequence, is_recomputed=False, is_recorded=False
        )
    records = sequence is not None and not forward_thread and sequence != outer.sequence
    if records and outer.call is not None:
        outer.call.is_recorded = True
    return replace(
        outer,
        operation=span,
        source=line or outer.source,
        is_recorded=outer.is_recorded or records,
        is_recomputed=outer.is_recomputed or (records and outer.is_backward),
    )


class Places:
    """Tell where the work of a process comes from, by the operations of all of its threads."""

    def __init__(self, threads: Iterable[list[Span]]) -> None:
        self._forward: dict[int, Around] = {}
        self._texts: dict[tuple[str, ...], str] = {}
        for span in _operations(threads):
            number = span.detail.sequence
            if number not in (None, NO_SEQUENCE) and span.around.is_recorded and not span.around.is_backward:
                self._forward[number] = span.around
            elif number is not None and span.around.is_recomputed:
                self._forward.setdefault(number, span.around)

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
        records = around.is_recorded or (around.call is not None and around.call.is_recorded)
        return "forward" if records else None


def _operations(threads: Iterable[list[Span]]) -> Iterator[Span]:
    for spans in threads:
        yield from (span for span in spans if span.what == "operation")
