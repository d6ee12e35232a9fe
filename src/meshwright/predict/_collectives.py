"""Price one collective: return its seconds and the link class that it keeps busy.

Inside a fast domain the fitted tables are used. Across domains, every device sends its share over its own
network link while the part of its own domain moves inside. The slower of the two counts, as in NCCL's rings
and trees over several rails, plus one synchronisation for each domain beyond the first.
Not modelled: congestion, rail mismatch, SHARP.
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
    """One run of one collective: its name in reports, the link class that it keeps busy, and its time.

    `axes`: the mesh axes, such as "data,fsdp". Where the groups follow no axes, the group size in words.
    """

    name: str
    axes: str
    link: str  # inside | between
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of the mesh axes on the fleet that differs from the order in the program.

    `sizes`: the axis sizes in the program's order. `axes`: the indices of the axes in `sizes`, with the
    outermost axis on the fleet first.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]


def transfer_of(machine: Machine, message: Message, num_devices: int, order: Order | None = None) -> Transfer:
    """Return the time of a message between the devices of its groups.

    Args:
        order: the placement of the program's devices on the fleet. None places them in the order of their
            numbers.

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
    """Return the bytes that one device sends inside its domain when the group spans several domains."""
    if message.kind == "all-to-all":
        return message.payload_bytes * (members - 1) / message.group_size
    return message.wire_bytes


def _between_bytes(message: Message, domains: int, members: int) -> float:
    """Return the bytes that one device sends to other domains. The links of a domain share its traffic.

    In a gather or a reduction over D domains, a domain as a whole sends (D-1)/D of the array, and twice that
    in an all-reduce. In an all-to-all, each device sends the parts of all other domains. In a permute, each
    device sends everything.
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
    """Return the number of domains of the worst group, and its largest number of devices in one domain.

    The worst group spans the most domains, and among those has the fewest devices in one. In a permute, each
    pair is a group, so that one crossing pair is enough.
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
