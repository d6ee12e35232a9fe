"""Count the bytes that one device's program exchanges in a step, by collective and mesh axes.

Counted: all-gather, reduce-scatter, all-reduce, all-to-all and collective-permute, as often as `Executions`
lists them. They may be synchronous, asynchronous, or inside an async computation or a fusion. Wire bytes are
those of a ring, or of any other scheme that sends no byte twice (see `Collective`).
Not counted, but listed as unpriced: point-to-point sends, broadcasts, ragged exchanges, and groups that are
not a block of the mesh. Dropped: groups of one device, which send nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from meshwright.hardware import Fleet

from ..hlo import (
    Array,
    Axes,
    Computation,
    Coordinates,
    Execution,
    Executions,
    Instruction,
    Program,
    axes_of,
    axes_of_pairs,
    dimensions_of,
    leaves_of,
    leaves_the_domain,
    parse_groups,
)
from ._records import Collective

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
KINDS_WITHOUT_RULE = ("send", "collective-broadcast", "ragged-all-to-all")
# Instructions that take no time on the device's compute stream, so that no collective can hide behind them.
IDLE = frozenset((
    "bitcast", "get-tuple-element", "tuple", "parameter", "constant", "partition-id", "replica-id",
    "after-all", "opt-barrier", "async-start", "async-update", "async-done", "copy-start", "copy-done",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One run of a collective on one device; `axes` is None if its groups are not a block of the mesh."""

    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    payload_bytes: int  # the result's
    wire_bytes: int  # sent by one device
    groups: str  # as printed


def message_of(computation: Computation, instruction: Instruction, mesh_axes: Axes) -> Message | None:
    """Return the collective that `instruction` is or starts; None if it is neither or sends nothing.

    Raises:
        ValueError: its replica groups have no known form.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    num_devices = 1
    for _, size in mesh_axes:
        num_devices *= size
    if kind == "collective-permute":
        text = instruction.attributes["source_target_pairs"]
        if text == "{}":  # XLA leaves permutes without pairs in the program; they send nothing
            return None
        pairs = parse_groups(text, num_devices)
        axes = axes_of_pairs(pairs, mesh_axes)
        group_size = 1
        for name, size in mesh_axes:
            group_size *= size if name in axes else 1
    else:
        text = instruction.attributes.get("replica_groups", "{}")
        groups = parse_groups(text, num_devices)
        axes, group_size = axes_of(groups, mesh_axes), len(groups[0])
    if group_size == 1:
        return None
    payload = sum(array.num_bytes for array in _results(computation, instruction))
    sent = {
        "all-gather": payload * (group_size - 1) // group_size,
        "reduce-scatter": payload * (group_size - 1),
        "all-reduce": 2 * payload * (group_size - 1) // group_size,
        "all-to-all": payload * (group_size - 1) // group_size,
        "collective-permute": payload,
    }
    return Message(
        kind=kind,
        axes=axes,
        group_size=group_size,
        payload_bytes=payload,
        wire_bytes=sent[kind],
        groups=text,
    )


def is_overlapped(computation: Computation, start: Instruction) -> bool:
    """Return whether something is computed between the start of a collective and its `-done`."""
    if not start.opcode.endswith("-start"):
        return False
    if start.backend_config.get("collective_backend_config", {}).get("is_sync", False):
        return False
    names = [instruction.name for instruction in computation.instructions]
    begin, end = names.index(start.name), names.index(_done(computation, start).name)
    between = computation.instructions[begin + 1 : end]
    return any(
        i.opcode not in IDLE and i.opcode.removesuffix("-start").removesuffix("-done") not in KINDS
        for i in between
    )


def traffic_of(
    executions: Executions, mesh_axes: Axes, fleet: Fleet, coordinates: Coordinates = ()
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """Return the collectives of one step on `fleet`, most wire bytes first, and the unpriced exchanges.

    `coordinates`: those of each device in its TPU slice, in the mesh's order; empty where unknown.

    Raises:
        ValueError: replica groups have no known form.
    """
    count = _Count(executions.program, mesh_axes, fleet, coordinates)
    for execution in executions:
        count.add(execution)
    collectives = sorted(count.by_key.values(), key=lambda c: (-c.wire_bytes, c.kind, c.axes))
    return tuple(collectives), tuple(
        f"{entry}, {times} times" if times > 1 else entry for entry, times in count.unpriced.items()
    )


def split_channels(program: Program) -> frozenset[str]:
    """Return the channels of collectives that are started, continued and ended in several fusions.

    XLA's TPU backend splits them so that the fusions also compute. Each fusion holds the collective.
    """
    fused = {n for _, i in program.instructions() if i.opcode == "fusion" for n in i.all_called}
    channels = Counter(
        i.attributes.get("channel_id", "")
        for computation, i in program.instructions()
        if computation.name in fused and i.opcode in KINDS
    )
    return frozenset(channel for channel, count in channels.items() if channel and count > 1)


def _done(computation: Computation, start: Instruction) -> Instruction:
    for instruction in computation.instructions:
        if instruction.opcode.endswith("-done") and instruction.operands[0].name == start.name:
            return instruction
    raise ValueError(f"%{start.name} is started and never awaited in %{computation.name}")


def _results(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """Return the result's arrays; those of a start are read from its `-done`, which holds no operands."""
    if instruction.opcode.endswith("-start"):
        return leaves_of(_done(computation, instruction).shape)
    return instruction.shapes


class _Count:
    """Sum up the messages of executions."""

    def __init__(self, program: Program, mesh_axes: Axes, fleet: Fleet, coordinates: Coordinates) -> None:
        self.by_key: dict[tuple[str, tuple[str, ...], int, bool, str, tuple[str, ...]], Collective] = {}
        self.unpriced: Counter[str] = Counter()
        self._mesh_axes = mesh_axes
        self._fleet = fleet
        self._coordinates = coordinates
        self._split_channels = split_channels(program)
        self._seen_channels: set[str] = set()

    def add(self, execution: Execution) -> None:
        computation, instruction, times = execution.computation, execution.instruction, execution.times
        if instruction.opcode in KINDS_WITHOUT_RULE:
            shapes = ", ".join(map(str, instruction.shapes))
            place = instruction.op_name or "an unnamed operation"
            self.unpriced[f"{instruction.opcode} of {shapes}, from {place}"] += times
        message = message_of(computation, instruction, self._mesh_axes)
        if message is None:
            return
        channel = instruction.attributes.get("channel_id", "")
        if channel in self._split_channels:
            if channel in self._seen_channels:
                return
            self._seen_channels.add(channel)
        if message.axes is None:
            text = (
                f"{message.kind} of {message.payload_bytes} bytes: {message.groups} is no block of the mesh"
            )
            self.unpriced[text] += times
            return
        overlapped = (
            channel in self._split_channels
            or is_overlapped(computation, instruction)
            or (execution.caller is not None and _computes_beside(execution.caller))
        )
        link, link_name = self._link(message)
        self._add(
            Collective(
                kind=message.kind,
                axes=message.axes,
                group_size=message.group_size,
                count=times,
                payload_bytes=times * message.payload_bytes,
                wire_bytes=times * message.wire_bytes,
                overlapped_count=times if overlapped else 0,
                in_loop=execution.in_loop,
                link=link,
                link_name=link_name,
                dimensions=dimensions_of(
                    parse_groups(message.groups, self._fleet.num_devices), self._coordinates
                ),
            )
        )

    def _add(self, new: Collective) -> None:
        key = (new.kind, new.axes, new.group_size, new.in_loop, new.link, new.dimensions)
        if old := self.by_key.get(key):
            new = dataclasses.replace(
                new,
                count=old.count + new.count,
                payload_bytes=old.payload_bytes + new.payload_bytes,
                wire_bytes=old.wire_bytes + new.wire_bytes,
                overlapped_count=old.overlapped_count + new.overlapped_count,
            )
        self.by_key[key] = new

    def _link(self, message: Message) -> tuple[str, str]:
        """Return the class of the slowest link that a message crosses, and its name in the catalog."""
        chip, per_domain = self._fleet.chip, self._fleet.chips_per_domain
        if leaves_the_domain(message.groups, self._fleet.num_devices, per_domain):
            return "between", chip.between.name if chip.between else ""
        return "inside", chip.inside.name if chip.inside else ""


def _computes_beside(caller: Execution) -> bool:
    """Return whether something else is computed while an asynchronous computation runs."""
    return caller.instruction.opcode == "async-start" and is_overlapped(
        caller.computation, caller.instruction
    )
