"""Bytes that one device's program exchanges in a step, by collective and mesh axes.

Counted: all-gather, reduce-scatter, all-reduce, all-to-all and collective-permute, synchronous, started and
awaited, or inside an async computation, times trip counts; a `conditional` by the branch that sends most.
Wire bytes are those of a ring or any other scheme that sends no byte twice (`Collective`'s docstring).
Not counted, but named as unpriced: point-to-point sends, broadcasts, ragged exchanges, and groups that are
no block of the mesh. Dropped: groups of one device, which send nothing.
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
    Instruction,
    Program,
    axes_of,
    axes_of_pairs,
    dimensions_of,
    leaves_of,
    leaves_the_domain,
    parse_groups,
    trips_of,
)
from ._flops import RUNNING
from ._records import Collective

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
KINDS_WITHOUT_RULE = ("send", "collective-broadcast", "ragged-all-to-all")
# What takes no time on the device's compute stream, so that a collective cannot hide behind it.
IDLE = frozenset((
    "bitcast", "get-tuple-element", "tuple", "parameter", "constant", "partition-id", "replica-id",
    "after-all", "opt-barrier", "async-start", "async-update", "async-done", "copy-start", "copy-done",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective run once, on one device. `axes` is None where its groups are no block of the mesh."""

    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    payload_bytes: int  # the result's
    wire_bytes: int  # sent by one device
    groups: str  # as printed


def message_of(computation: Computation, instruction: Instruction, mesh_axes: Axes) -> Message | None:
    """The collective that `instruction` is or starts; None where it is none, or sends nothing.

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
        if text == "{}":  # no pair: XLA leaves such ones, which send nothing
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
    """Whether something is computed between a started collective and the instruction that awaits it."""
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
    program: Program, mesh_axes: Axes, fleet: Fleet, coordinates: Coordinates = ()
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """The collectives of one step on `fleet`, most wire bytes first, and what has no rule.

    `coordinates`: of each device in its TPU slice, in the mesh's order; none where they are not known.

    Raises:
        ValueError: replica groups of an unknown form.
    """
    walk = _Walk(program, mesh_axes, fleet, coordinates)
    total = walk.computation(program.entry, 1, False, False)
    collectives = sorted(total.by_key.values(), key=lambda c: (-c.wire_bytes, c.kind, c.axes))
    return tuple(collectives), tuple(
        f"{entry}, {count} times" if count > 1 else entry for entry, count in total.unpriced.items()
    )


def _done(computation: Computation, start: Instruction) -> Instruction:
    for instruction in computation.instructions:
        if instruction.opcode.endswith("-done") and instruction.operands[0].name == start.name:
            return instruction
    raise ValueError(f"%{start.name} is started and never awaited in %{computation.name}")


def _results(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """The result's arrays: a start's tuple also holds its operands, what awaits it does not."""
    if instruction.opcode.endswith("-start"):
        return leaves_of(_done(computation, instruction).shape)
    return instruction.shapes


@dataclass(slots=True)
class _Traffic:
    by_key: dict[tuple[str, tuple[str, ...], int, bool, str, tuple[str, ...]], Collective]
    unpriced: Counter[str]

    def add(self, other: _Traffic) -> None:
        for collective in other.by_key.values():
            self.add_one(collective)
        self.unpriced.update(other.unpriced)

    def add_one(self, new: Collective) -> None:
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


class _Walk:
    def __init__(self, program: Program, mesh_axes: Axes, fleet: Fleet, coordinates: Coordinates) -> None:
        self._program = program
        self._mesh_axes = mesh_axes
        self._fleet = fleet
        self._coordinates = coordinates
        fused = {n for _, i in program.instructions() if i.opcode == "fusion" for n in i.all_called}
        self._channels = Counter(
            i.attributes.get("channel_id", "")
            for computation, i in program.instructions()
            if computation.name in fused and i.opcode in KINDS
        )
        self._seen_channels: set[str] = set()

    def _split_channel(self, instruction: Instruction) -> str:
        """The channel of a TPU collective that is started, carried on and ended in several fusions."""
        channel = instruction.attributes.get("channel_id", "")
        return channel if self._channels[channel] > 1 else ""

    def computation(self, computation: Computation, times: int, in_loop: bool, overlapped: bool) -> _Traffic:
        total = _Traffic(by_key={}, unpriced=Counter())
        for instruction in computation.instructions:
            self._one(total, computation, instruction, times, in_loop, overlapped)
            called = [self._program.computations[name] for name in instruction.all_called]
            if instruction.opcode == "while":
                # A loop of unknown length counts once; the FLOPs' walk names it among the unpriced.
                trips = trips_of(self._program, computation, instruction)
                for inner in called:
                    total.add(self.computation(inner, times * (1 if trips is None else trips), True, False))
            elif instruction.opcode == "conditional":
                branches = [self.computation(inner, times, in_loop, False) for inner in called]
                total.add(max(branches, key=lambda t: sum(c.wire_bytes for c in t.by_key.values())))
            elif instruction.opcode in RUNNING:
                beside = instruction.opcode == "async-start" and is_overlapped(computation, instruction)
                for inner in called:
                    total.add(self.computation(inner, times, in_loop, beside))
        return total

    def _one(
        self,
        total: _Traffic,
        computation: Computation,
        instruction: Instruction,
        times: int,
        in_loop: bool,
        overlapped: bool,
    ) -> None:
        if instruction.opcode in KINDS_WITHOUT_RULE:
            shapes = ", ".join(map(str, instruction.shapes))
            place = instruction.op_name or "an unnamed operation"
            total.unpriced[f"{instruction.opcode} of {shapes}, from {place}"] += times
        message = message_of(computation, instruction, self._mesh_axes)
        if message is None:
            return
        if channel := self._split_channel(instruction):
            if channel in self._seen_channels:
                return
            self._seen_channels.add(channel)
            overlapped = True
        if message.axes is None:
            text = (
                f"{message.kind} of {message.payload_bytes} bytes: {message.groups} is no block of the mesh"
            )
            total.unpriced[text] += times
            return
        overlapped = overlapped or is_overlapped(computation, instruction)
        link, link_name = self._link(message)
        total.add_one(
            Collective(
                kind=message.kind,
                axes=message.axes,
                group_size=message.group_size,
                count=times,
                payload_bytes=times * message.payload_bytes,
                wire_bytes=times * message.wire_bytes,
                overlapped_count=times if overlapped else 0,
                in_loop=in_loop,
                link=link,
                link_name=link_name,
                dimensions=dimensions_of(
                    parse_groups(message.groups, self._fleet.num_devices), self._coordinates
                ),
            )
        )

    def _link(self, message: Message) -> tuple[str, str]:
        """The class of the slowest link that a message crosses, and its name in the catalog."""
        chip, per_domain = self._fleet.chip, self._fleet.chips_per_domain
        if leaves_the_domain(message.groups, self._fleet.num_devices, per_domain):
            return "between", chip.between.name if chip.between else ""
        return "inside", chip.inside.name if chip.inside else ""
