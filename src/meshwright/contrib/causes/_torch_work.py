"""Make work of the kernels in a trace of torch.profiler; on a CPU, of its operations.

A kernel's launch has the same correlation, and lies inside of the operation that asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._recorded import UNKNOWN, Work
from ._torch_names import (
    COMPILED_GRAPH,
    FORMATS,
    MESSAGE,
    NO_WORK,
    VIEWS,
    WAITS,
    bare,
    copy_kind,
    elements_bytes,
    kernel_kind,
    message_kind,
    operation_kind,
    product_flops,
    sizes,
)
from ._torch_threads import OUTSIDE, Around, Places, Span

LEAST_SECONDS = 5e-7  # of a part of a CPU's operation, below which it is its caller's
LONGEST_SHAPE = 200
PRODUCTS = ("matmul", "attention", "convolution")


@dataclass(slots=True)
class Kernel:
    """A kernel, copy or message of a device. `message`: the arguments of its event, if it is one."""

    what: str
    name: str
    begin: float
    seconds: float
    device: str
    stream: str
    correlation: int | None
    external: int | None
    num_bytes: int | None
    message: dict[str, Any] | None


def device_work(
    kernels: Sequence[Kernel], threads: Mapping[str, list[Span]], places: Places, rank: int
) -> list[Work]:
    """Return the work of a process's devices."""
    launches: dict[int | None, Span] = {}
    by_external: dict[int | None, Span] = {}
    for spans in threads.values():
        for span in spans:
            if span.what == "operation":
                by_external[span.detail.external] = span
            elif span.what == "call":
                launches[span.detail] = span
    found: list[Work] = []
    for kernel in kernels:
        launch = launches.get(kernel.correlation) if kernel.correlation is not None else None
        around = OUTSIDE if launch is None else launch.around
        if around.operation is None and kernel.external is not None:
            operation = by_external.get(kernel.external)
            around = around if operation is None else operation.around
        found.append(_work_of(kernel, around, places, rank))
    return found


def _work_of(kernel: Kernel, around: Around, places: Places, rank: int) -> Work:
    place, operation = places.of(around), around.operation
    name = operation.name if operation is not None else ""
    dims = operation.detail.dims if operation is not None else None
    format_name = _format(operation.detail.types) if operation is not None else None
    kind = copy_kind(kernel.name) if kernel.what == "copy" else kernel_kind(kernel.name, name)
    num_bytes, group = kernel.num_bytes, None
    if kernel.message is not None:
        kind = _message_of(kernel, around, kind)
        num_bytes, group = _message_bytes(kernel.message), _group(kernel.message)
        format_name = FORMATS.get(str(kernel.message.get("dtype")).lower())
    elif format_name == "fp32" and "tf32" in kernel.name.lower():
        format_name = "tf32"
    is_product = kind in PRODUCTS
    return Work(
        name=kernel.name,
        kind=kind,
        rank=rank,
        device=f"{rank}/{kernel.device}",
        stream=kernel.stream,
        begin_seconds=kernel.begin,
        seconds=kernel.seconds,
        source=place.source,
        scope=place.scope,
        phase=place.phase,
        recomputed=place.is_recomputed,
        format_name=format_name,
        shape=_shape(dims) if is_product else None,
        flops=product_flops(name, dims) if is_product else None,
        num_bytes=None if num_bytes is None else float(num_bytes),
        group=group,
        launch="" if kernel.correlation is None else str(kernel.correlation),
    )


def _message_of(kernel: Kernel, around: Around, kind: str) -> str:
    said = str((kernel.message or {}).get("Collective name", ""))
    annotated = MESSAGE.match(around.annotation)
    named = message_kind(said) or (message_kind(annotated[1]) if annotated else None)
    return named or message_kind(kernel.name) or ("message" if kind == UNKNOWN else kind)


def _message_bytes(args: Mapping[str, Any]) -> float | None:
    counts = [args.get(name) for name in ("In msg nelems", "Out msg nelems")]
    whole = [count for count in counts if type(count) is int and 0 <= count < 2**60]
    return elements_bytes((max(whole),), args.get("dtype")) if whole else None


def _group(args: Mapping[str, Any]) -> str | None:
    ranks, name = args.get("Process Group Ranks"), args.get("Process Group Description")
    size = args.get("Group size")
    found = ranks or name or (f"{size} ranks" if size else None)
    return str(found)[:LONGEST_SHAPE] if found else None


def _format(types: Any) -> str | None:
    """Return the format of the first operand of floating point."""
    for each in types if isinstance(types, list) else ():
        if isinstance(each, str) and (found := FORMATS.get(each.lower())):
            return found
    return None


def _shape(dims: Any) -> str | None:
    return str(dims)[:LONGEST_SHAPE] if dims else None


def cpu_work(threads: Mapping[str, list[Span]], places: Places, rank: int) -> list[Work]:
    """Return the work of a CPU: its operations without those inside of them, and what gloo sends."""
    found: list[Work] = []
    for thread, spans in threads.items():
        for span in spans:
            sent = MESSAGE.match(span.name) if span.what == "annotation" else None
            if sent is not None:
                found.append(_sent(span, sent[1], rank, thread))
            elif _does_work(span):
                found += _parts(span, places, rank, thread)
    return found


def _does_work(span: Span) -> bool:
    if span.around.host_kind is not None:
        return False
    if span.what == "annotation":
        return span.name.startswith(COMPILED_GRAPH)
    return (
        span.what == "operation"
        and ("::" in span.name or "_fused_" in span.name)
        and not span.name.startswith(NO_WORK)
        and bare(span.name) not in VIEWS
        and bare(span.name) not in WAITS
    )


def _sent(span: Span, name: str, rank: int, thread: str) -> Work:
    detail = span.detail
    types = detail.types[0] if isinstance(detail.types, list) and detail.types else None
    return Work(
        name=span.name,
        kind=message_kind(name) or UNKNOWN,
        rank=rank,
        device=f"{rank}/cpu",
        stream=thread,
        begin_seconds=span.begin,
        seconds=span.end - span.begin,
        format_name=FORMATS.get(str(types).lower()),
        num_bytes=elements_bytes(sizes(detail.dims, 0), types),
    )


def _parts(span: Span, places: Places, rank: int, thread: str) -> Iterator[Work]:
    """Yield the parts of an operation that no other operation inside of it takes."""
    place = places.of(span.around)
    is_graph = span.what == "annotation"
    kind = UNKNOWN if is_graph else operation_kind(span.name)
    is_product = kind in PRODUCTS
    dims = None if is_graph else span.detail.dims
    flops = product_flops(span.name, dims) if is_product else None
    for begin, end in _free(span):
        yield Work(
            name=span.name,
            kind=kind,
            rank=rank,
            device=f"{rank}/cpu",
            stream=thread,
            begin_seconds=begin,
            seconds=end - begin,
            source=place.source,
            scope=place.scope,
            phase=place.phase,
            recomputed=place.is_recomputed,
            format_name=None if is_graph else _format(span.detail.types),
            shape=_shape(dims) if is_product else None,
            flops=flops,
        )
        flops = None  # counted once


def _free(span: Span) -> Iterator[tuple[float, float]]:
    begin = span.begin
    for child in span.children or ():
        if child.what == "operation" and bare(child.name) in VIEWS and child.children is None:
            continue
        if child.begin - begin >= LEAST_SECONDS:
            yield begin, child.begin
        begin = max(begin, min(child.end, span.end))
    if span.end - begin >= LEAST_SECONDS:
        yield begin, span.end
