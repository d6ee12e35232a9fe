"""Read the collectives of a step off the operations of torch.distributed.

Collectives have the names and byte rules of `meshwright.ledger.Collective`. Both of PyTorch's forms are read:
`c10d` writes into tensors that the caller made, and `_c10d_functional` returns new ones.
Counted: all-gather, reduce-scatter, all-reduce, all-to-all. Not counted, but listed as unpriced: broadcasts,
point-to-point messages, and other exchanges. Dropped: groups of one rank, barriers.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.eager import RankMessage
from meshwright.hardware import Fleet
from meshwright.hlo import Axes, axes_of
from meshwright.ledger import Collective, Message, crossing_bytes, domains_of
from meshwright.units import format_bytes

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
SILENT = ("barrier", "monitored_barrier_", "check_for_nan", "wait_tensor")
# The beginning of an operation's name, in either form.
KINDS = {
    "_allgather_base": "all-gather", "allgather": "all-gather", "all_gather": "all-gather",
    "_reduce_scatter_base": "reduce-scatter", "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce", "all_reduce": "all-reduce",
    "alltoall": "all-to-all", "all_to_all": "all-to-all",
}  # fmt: skip
OWN_STREAMS = ("torch/distributed/fsdp/",)  # whose collectives run beside the computation


def message_kind(name: str) -> str | None:
    """Return the kind of an operation of the `NAMESPACES`; None if it moves nothing.

    A kind that is none of `KINDS` is the operation's own name.
    """
    bare = name.partition(".")[2]
    if bare in SILENT:
        return None
    return next((kind for start, kind in KINDS.items() if bare.startswith(start)), bare.strip("_"))


def message_of(
    call: Any, kind: str, phase: str, mesh_axes: Axes
) -> tuple[RankMessage | None, tuple[int, ...]]:
    """Return the collective of an `OperationCall` and the ranks of its group; None for a group of one.

    It has no axes if its group is not a block of the mesh.
    """
    ranks = _ranks(call.arguments)
    size = len(ranks)
    if size == 1:
        return None, ranks
    in_place = call.name.startswith("c10d.")
    written = next(iter(call.arguments.values())) if in_place else call.result
    payload = sum(t.numel() * t.itemsize for t in pytree.tree_leaves(written) if isinstance(t, torch.Tensor))
    axes = axes_of((ranks,), mesh_axes) if ranks else None
    return RankMessage(
        kind=kind,
        axes=axes or (),
        group_size=size,
        phase=phase,
        count=1,
        payload_bytes=payload,
        wire_bytes=_wire_bytes(kind, payload, size),
        array_bytes=payload * (size if kind == "reduce-scatter" else 1),
        overlapped_count=int(in_place and _may_overlap(call)),
    ), ranks


def _wire_bytes(kind: str, payload: int, size: int) -> int:
    match kind:
        case "all-gather" | "all-to-all":
            return payload * (size - 1) // size
        case "reduce-scatter":
            return payload * (size - 1)
        case "all-reduce":
            return 2 * payload * (size - 1) // size
        case _:
            return payload


def _may_overlap(call: Any) -> bool:
    """Return whether the caller goes on before the message is done: asynchronous, or on FSDP's streams."""
    if call.arguments.get("async_op"):
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in OWN_STREAMS):
            return True
        frame = frame.f_back
    return False


def _ranks(arguments: dict[str, Any]) -> tuple[int, ...]:
    """Return the ranks of the process group that an operation names; empty if it names none."""
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed import ProcessGroup, get_process_group_ranks

    group = arguments.get("process_group", arguments.get("group_name"))
    if group is None:
        return ()
    if isinstance(group, str):
        group = _resolve_process_group(group)  # pyright: ignore[reportArgumentType]
    elif not isinstance(group, ProcessGroup):
        group = ProcessGroup.unbox(group)
    return tuple(get_process_group_ranks(group))


def merged(messages: Iterable[RankMessage]) -> tuple[RankMessage, ...]:
    """Return the sums of messages that differ only in their amounts, most wire bytes first."""
    sums: dict[tuple[object, ...], RankMessage] = {}
    for new in messages:
        key = (new.kind, new.axes, new.group_size, new.phase)
        sums[key] = sums[key] + new if key in sums else new
    return tuple(sorted(sums.values(), key=lambda m: (-m.wire_bytes, m.kind, m.axes, m.phase)))


def _added(by_line: dict[str, int], line: str, wire_bytes: int) -> dict[str, int]:
    return {**by_line, line: by_line.get(line, 0) + wire_bytes}


def traffic_of(
    messages: Iterable[tuple[RankMessage, tuple[int, ...], str]], fleet: Fleet
) -> tuple[tuple[Collective, ...], Counter[str]]:
    """Return the collectives of a step, most wire bytes first, and the exchanges that no rule counts.

    Args:
        messages: each with the ranks of its group, and its source line.
    """
    sums: dict[tuple[object, ...], Collective] = {}
    unpriced: Counter[str] = Counter()
    for message, ranks, line in messages:
        if message.kind not in KINDS.values():
            unpriced[f"{message.kind} of {format_bytes(message.payload_bytes)}, {message.phase}"] += 1
            continue
        domains, members = domains_of(ranks, fleet.chips_per_domain)
        crosses = domains > 1
        whole = Message(
            kind=message.kind,
            axes=message.axes,
            group_size=message.group_size,
            payload_bytes=message.payload_bytes,
            wire_bytes=message.wire_bytes,
        )
        link = fleet.between if crosses else fleet.inside
        where = "between" if crosses else "inside"
        key = (message.kind, message.axes, message.group_size, where)
        before = sums.get(key)
        sums[key] = Collective(
            kind=message.kind,
            axes=message.axes,
            group_size=message.group_size,
            count=message.count + (before.count if before else 0),
            payload_bytes=message.payload_bytes + (before.payload_bytes if before else 0),
            wire_bytes=message.wire_bytes + (before.wire_bytes if before else 0),
            overlapped_count=message.overlapped_count + (before.overlapped_count if before else 0),
            in_loop=False,
            link=where,
            link_name="" if link is None else link.name,
            crossing_bytes=int(crossing_bytes(whole, domains, members))
            + (before.crossing_bytes if before else 0),
            by_line=_added(before.by_line if before else {}, line, message.wire_bytes),
        )
    return tuple(sorted(sums.values(), key=lambda c: (-c.wire_bytes, c.kind, c.axes))), unpriced
