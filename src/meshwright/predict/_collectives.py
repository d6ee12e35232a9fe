"""Seconds of one collective, and the link class that it keeps busy.

Inside a fast domain: the fitted tables. Across domains: every device sends its share over its own network
link while its domain's part moves inside (prediction by the slower of the two, as NCCL's rings and trees
over several rails do), plus a synchronisation per domain. Not modelled: congestion, rail mismatch, SHARP.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.hlo import iota_of, parse_groups
from meshwright.ledger import Message

from ._machine import Machine
from ._rates import collective_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective run once: its name in reports, the link class it keeps busy, its time.

    `axes`: of the mesh, "data,fsdp", or the size of its groups where they lie along none.
    """

    name: str
    axes: str
    link: str  # inside | between
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of the mesh axes on the fleet, for a program whose devices are numbered in another.

    `sizes`: of the axes in the program's own order. `axes`: the places of those axes in `sizes`, outermost
    on the fleet first.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]


def transfer_of(machine: Machine, message: Message, num_devices: int, order: Order | None = None) -> Transfer:
    """Return the time of a message between the devices of its groups.

    Args:
        order: how the program's devices lie on the fleet; in the order of their numbers unless told.

    Raises:
        InputError: the message crosses a link for which the catalog has no figure.
    """
    permute = message.kind == "collective-permute"
    domains, members = _span(message.groups, num_devices, machine.devices_per_domain, permute, order)
    where = ",".join(message.axes) if message.axes is not None else f"groups of {message.group_size}"
    name = f"{message.kind}[{where}]"
    inside = 0.0
    if members > 1 or domains == 1:
        rate = machine.rates.collective_for(message.kind, message.group_size if domains == 1 else members)
        link = _known(machine, machine.inside_bytes_per_second, "inside a domain")
        sent = message.wire_bytes if domains == 1 else _inside_bytes(message, members)
        inside = float(collective_seconds(rate, wire_bytes=sent, bytes_per_second=link))
    if domains == 1:
        return Transfer(name=name, axes=where, link="inside", seconds=inside)
    network = _known(machine, machine.between_bytes_per_second, "between domains")
    network *= machine.shared.network_efficiency
    between = _between_bytes(message, domains, members) / network
    seconds = max(inside, between) + machine.shared.network_alpha_seconds * (domains - 1)
    return Transfer(name=name, axes=where, link="between", seconds=seconds)


def _inside_bytes(message: Message, members: int) -> float:
    """What one device sends inside its domain when the group spans several."""
    if message.kind == "all-to-all":
        return message.payload_bytes * (members - 1) / message.group_size
    return message.wire_bytes


def _between_bytes(message: Message, domains: int, members: int) -> float:
    """What one device sends to other domains: its domain's traffic shared by the domain's links.

    Of a gather or reduction the domain as a whole sends (D-1)/D of the array (twice for all-reduce);
    of an all-to-all each device sends every other domain's part; of a permute everything.
    """
    if message.kind == "collective-permute":
        return message.payload_bytes
    if message.kind == "all-to-all":
        return message.payload_bytes * (message.group_size - members) / message.group_size
    whole = message.wire_bytes * message.group_size / (message.group_size - 1)
    return whole * (domains - 1) / domains / members


@functools.lru_cache(maxsize=10_000)
def _span(
    groups: str, num_devices: int, devices_per_domain: int, permute: bool, order: Order | None
) -> tuple[int, int]:
    """Return how many domains a group reaches, and how many of its devices share one: the worst group's.

    Of a permute each pair counts for itself: one crossing pair is enough.
    """
    worst = (1, 1)
    places = range(num_devices) if order is None else _places(order)
    for group in parse_groups(groups, num_devices):
        count = Counter(places[device] // devices_per_domain for device in group)
        members = 1 if permute and len(count) > 1 else max(count.values())
        worst = max(worst, (len(count), members), key=lambda found: (found[0], -found[1]))
    return worst


@functools.cache
def _places(order: Order) -> tuple[int, ...]:
    """Return the place on the fleet of each of the program's devices."""
    places = [0] * math.prod(order.sizes)
    for place, device in enumerate(iota_of(order.sizes, order.axes)):
        places[device] = place
    return tuple(places)


def _known(machine: Machine, bytes_per_second: float | None, where: str) -> float:
    if bytes_per_second is None:
        raise InputError(
            f"the catalog has no figure for the link {where} of {machine.name}",
            hint="choose a fleet that is one fast domain, or a chip whose links are known",
        )
    return bytes_per_second
