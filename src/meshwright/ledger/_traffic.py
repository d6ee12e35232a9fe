"""Count the bytes that one device's program exchanges in a step, by collective and mesh axes.

Counted: all-gather, reduce-scatter, all-reduce, all-to-all (also ragged) and collective-permute, as often as
`Executions` lists them. They may be synchronous, asynchronous, or inside an async computation or a fusion.
Wire bytes are those of a ring, or of any other scheme that sends no byte twice (see `Collective`). What a
ragged all-to-all sends is known to the run alone: each device is taken to send an equal part of its operand
to every device of the group.
Not counted, but listed as unpriced: point-to-point sends, broadcasts, and groups that are not a block of the
mesh. Dropped: groups of one device, which send nothing.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.hardware import Fleet
from meshwright.hlo import (
    COLLECTIVES,
    FREE,
    OTHER_EXCHANGES,
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
    module_of,
    parse_groups,
)

from ._ledger_records import Collective

# Instructions that take no time on the device's compute stream, so that no collective can hide behind them.
_IDLE = FREE | {"async-start", "async-update", "async-done", "copy-start", "copy-done"}


RAGGED = "ragged-all-to-all"
EXCHANGES = ("all-to-all", RAGGED)
"""Kinds of messages in which each device sends every other a part of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One run of a collective on one device; `axes` is None if its groups are not a block of the mesh.

    `moves_tokens`: it exchanges what the experts' devices compute, or the results.
    """

    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    payload_bytes: int  # the result's; of a ragged all-to-all the operand's
    wire_bytes: int  # sent by one device
    groups: str = ""  # as printed
    moves_tokens: bool = False


def message_of(computation: Computation, instruction: Instruction, mesh_axes: Axes) -> Message | None:
    """Return the collective that `instruction` is or starts; None if it is neither or sends nothing.

    Raises:
        ValueError: its replica groups have no known form.
    """
    kind = instruction.collective
    if not kind or instruction.opcode.endswith("-done"):
        return None
    num_devices = math.prod(size for _, size in mesh_axes)
    if kind == "collective-permute":
        text = instruction.attributes["source_target_pairs"]
        if text == "{}":  # XLA leaves permutes without pairs in the program; they send nothing
            return None
        axes = axes_of_pairs(parse_groups(text, num_devices), mesh_axes)
        size = math.prod(size for name, size in mesh_axes if name in axes)
    else:
        text = instruction.attributes.get("replica_groups", "{}")
        groups = parse_groups(text, num_devices)
        axes, size = axes_of(groups, mesh_axes), len(groups[0])
    if size == 1:
        return None
    # The result of a start is read from its `-done`, which holds no operands.
    done = computation.done_of(instruction) if instruction.opcode.endswith("-start") else instruction
    num_bytes = done.num_bytes
    if kind == RAGGED:  # the result is the buffer that the parts are written into
        num_bytes = sum(a.num_bytes for a in leaves_of(computation.operand_shape(instruction.operands[0])))
    wire_bytes = {
        "all-gather": done.num_bytes * (size - 1) // size,
        "reduce-scatter": done.num_bytes * (size - 1),
        "all-reduce": 2 * done.num_bytes * (size - 1) // size,
        "all-to-all": num_bytes * (size - 1) // size,
        RAGGED: num_bytes * (size - 1) // size,
        "collective-permute": done.num_bytes,
    }[kind]
    return Message(
        kind=kind,
        axes=axes,
        group_size=size,
        payload_bytes=num_bytes,
        wire_bytes=wire_bytes,
        groups=text,
        moves_tokens=is_of_experts(instruction.op_name) and (kind == "all-to-all" or axes == ("tensor",)),
    )


def is_of_experts(op_name: str) -> bool:
    """Return whether an operation stands in the scope of experts (`contrib.experts`), router apart.

    >>> is_of_experts("jit(step)/jvp(layers)/while/body/mlp_block/experts/shard_map/up/dot_general")
    True
    """
    scopes = module_of(op_name).split("/")
    return "experts" in scopes and "router" not in scopes


def is_overlapped(computation: Computation, start: Instruction) -> bool:
    """Return whether something is computed between the start of a collective and its `-done`."""
    if not start.opcode.endswith("-start") or start.is_synchronous:
        return False
    begin, end = computation.places[start.name], computation.places[computation.done_of(start).name]
    between = computation.instructions[begin + 1 : end]
    return any(i.opcode not in _IDLE and not i.collective for i in between)


def crossing_bytes(message: Message, domains: int, members: int, *, slices: bool = False) -> float:
    """Return the bytes that leave a fast domain, for each of its devices in the group.

    NCCL gathers and reduces in rings of all devices, one for each link of a domain: a link carries what a
    device sends in its ring, over the domain's members. Between two domains, an all-reduce runs in trees
    instead, which send the array once (github.com/NVIDIA/nccl, issue 812). In an all-to-all, each device
    sends the parts of all other domains. In a permute, each device sends everything.

    Between TPU slices, XLA reduces and gathers inside each, so that a device exchanges its part of the array
    with its like in the other slices, once or, of a sum, twice.

    Args:
        domains: over how many fast domains a group extends.
        members: the group's devices in one of them.
        slices: whether the domains are TPU slices.
    """
    if domains == 1:
        return 0
    if message.kind == "collective-permute":
        return message.payload_bytes
    if message.kind in EXCHANGES:
        return message.payload_bytes * (message.group_size - members) / message.group_size
    if slices:
        whole = message.payload_bytes * (message.group_size if message.kind == "reduce-scatter" else 1)
        return whole / members * (domains - 1) / domains * (2 if message.kind == "all-reduce" else 1)
    if message.kind == "all-reduce" and domains == 2:
        return message.payload_bytes / members
    return message.wire_bytes / members


@functools.lru_cache(maxsize=10_000)
def span_of(
    groups: str,
    num_devices: int,
    devices_per_domain: int,
    permute: bool,
    places: tuple[int, ...] | None = None,
) -> tuple[int, int]:
    """Return the number of domains of the worst group, and its largest number of devices in one domain.

    The worst group spans the most domains, and among those has the fewest devices in one. In a permute, each
    pair is a group, so that one crossing pair is enough.

    Args:
        groups: as printed in the program.
        places: of the program's devices on the fleet; None for the order of their numbers.
    """
    worst = (1, 1)
    for group in parse_groups(groups, num_devices):
        on_fleet = group if places is None else [places[device] for device in group]
        count, members = domains_of(on_fleet, devices_per_domain)
        worst = max(
            worst, (count, 1 if permute and count > 1 else members), key=lambda found: (found[0], -found[1])
        )
    return worst


def domains_of(places: Sequence[int], devices_per_domain: int) -> tuple[int, int]:
    """Return over how many domains a group of devices extends, and the most of them in one."""
    count = Counter(place // devices_per_domain for place in places)
    return max(1, len(count)), max(count.values(), default=1)


def _crossing(message: Message, fleet: Fleet) -> float:
    """Return the bytes of a message that leave the fast domain, as an average over the devices that send."""
    size = fleet.chips_per_domain
    if message.kind == "collective-permute":
        pairs = parse_groups(message.groups, fleet.num_devices)
        return message.payload_bytes * sum(domains_of(pair, size)[0] > 1 for pair in pairs) / len(pairs)
    span = span_of(message.groups, fleet.num_devices, size, permute=False)
    return crossing_bytes(message, *span, slices=fleet.domain == "slice")


def traffic_of(
    executions: Executions, mesh_axes: Axes, fleet: Fleet, coordinates: Coordinates = ()
) -> tuple[tuple[Collective, ...], Counter[str]]:
    """Return the collectives of one step on `fleet`, most wire bytes first, and the unpriced exchanges.

    `coordinates`: those of each device in its TPU slice, in the mesh's order; empty where unknown.

    Raises:
        ValueError: replica groups have no known form.
    """
    unpriced: Counter[str] = Counter()
    by_key: dict[tuple[object, ...], Collective] = {}
    split, seen = split_channels(executions.program), set[str]()
    for execution in executions:
        computation, instruction, times = execution.computation, execution.instruction, execution.times
        if instruction.opcode in OTHER_EXCHANGES:
            shapes = ", ".join(map(str, instruction.arrays))
            place = instruction.op_name or "an unnamed operation"
            unpriced[f"{instruction.opcode} of {shapes}, from {place}"] += times
        if not instruction.collective:
            continue
        message = message_of(computation, instruction, mesh_axes)
        channel = instruction.attributes.get("channel_id", "")
        if message is None or channel in seen:
            continue
        if channel in split:
            seen.add(channel)
        if message.axes is None:
            size, groups = message.payload_bytes, message.groups
            unpriced[f"{message.kind} of {size} bytes: {groups} is not a block of the mesh"] += times
            continue
        link, link_name = _link(message, fleet)
        overlapped = channel in split or _runs_beside_computation(execution)
        new = Collective(
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
            dimensions=dimensions_of(parse_groups(message.groups, fleet.num_devices), coordinates),
            crossing_bytes=int(times * _crossing(message, fleet)),
            by_line={executions.program.source_line(instruction): times * message.wire_bytes},
        )
        key = (new.kind, new.axes, new.group_size, new.in_loop, new.link, new.dimensions)
        by_key[key] = _sum(by_key[key], new) if key in by_key else new
    collectives = sorted(by_key.values(), key=lambda c: (-c.wire_bytes, c.kind, c.axes))
    return tuple(collectives), unpriced


def split_channels(program: Program) -> frozenset[str]:
    """Return the channels of collectives that are started, continued and ended in several fusions.

    XLA's TPU backend splits them so that the fusions also compute. Each fusion holds the collective.
    """
    channels = Counter(channel for _, channel in _fused_channels(program))
    return frozenset(channel for channel, count in channels.items() if channel and count > 1)


def channels_through_loops(program: Program) -> frozenset[tuple[str, str]]:
    """Return the loop bodies in which fusions continue a collective from outside, with its channel.

    It begins before the loop and ends after it. Each round's fusion holds it, and it runs once.
    """
    homes: dict[str, set[str]] = {}
    for home, channel in _fused_channels(program):
        homes.setdefault(channel, set()).add(home)
    shared = {channel: of_channel for channel, of_channel in homes.items() if channel and len(of_channel) > 1}
    if not shared:
        return frozenset()
    around = {
        called: home.name
        for home, i in program.instructions()
        if i.opcode != "fusion"
        for called in i.all_called
    }

    def continues(home: str, of_channel: set[str]) -> bool:
        while (home := around.get(home, "")) and home not in of_channel:
            pass
        return bool(home)

    return frozenset(
        (home, channel) for channel, each in shared.items() for home in each if continues(home, each)
    )


def _fused_channels(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the computation of each fusion that holds a collective, with the collective's channel."""
    for home, instruction in program.instructions():
        if instruction.opcode == "fusion":
            for _, inner in program.inside(instruction):
                if inner.opcode in COLLECTIVES:
                    yield home.name, inner.attributes.get("channel_id", "")


def _link(message: Message, fleet: Fleet) -> tuple[str, str]:
    """Return the class of the slowest link that a message crosses, and its name in the catalog."""
    leaves = leaves_the_domain(message.groups, fleet.num_devices, fleet.chips_per_domain)
    link = fleet.chip.between if leaves else fleet.chip.inside
    return "between" if leaves else "inside", link.name if link else ""


def _runs_beside_computation(execution: Execution) -> bool:
    """Return whether something is computed while a collective, or the async computation around it, runs."""
    around = [execution]
    if execution.caller is not None and execution.caller.instruction.opcode == "async-start":
        around.append(execution.caller)
    return any(is_overlapped(run.computation, run.instruction) for run in around)


def _sum(one: Collective, other: Collective) -> Collective:
    return replace(
        one,
        count=one.count + other.count,
        payload_bytes=one.payload_bytes + other.payload_bytes,
        wire_bytes=one.wire_bytes + other.wire_bytes,
        overlapped_count=one.overlapped_count + other.overlapped_count,
        crossing_bytes=one.crossing_bytes + other.crossing_bytes,
        by_line=dict((Counter(one.by_line) + Counter(other.by_line)).most_common()),
    )
