"""Which devices of its host each process takes, and what fleet all of them make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..config import near_divisors, or_list
from ..errors import InputError
from ..hardware import Fleet, chip_of_device_kind


def share_of(num_visible: int, place: int, num_processes: int) -> list[int]:
    """The devices of process `place` of a host's, as numbers of what it sees. A scheduler that shows each
    process its own shows fewer than there are processes: then they are all its own.

    Raises:
        InputError: they cannot be shared evenly.
    """
    if num_visible < num_processes:
        return list(range(num_visible))
    if num_visible % num_processes:
        raise InputError(
            f"{num_processes} processes cannot share the {num_visible} devices of a host evenly",
            hint=f"start {or_list(near_divisors(num_visible, num_processes))} processes on each host",
        )
    each = num_visible // num_processes
    return list(range(place * each, (place + 1) * each))


def fleet_of_hosts(seen: Sequence[Sequence[str | int]]) -> Fleet:
    """The fleet that the hosts of several processes make.

    Args:
        seen: by process its host's name, the kind of the devices it sees, and how many it sees.

    Raises:
        InputError: the hosts differ, or no chip of the catalog reports that kind.
    """
    processes = Counter(str(host) for host, _, _ in seen)
    there: dict[str, tuple[str, int]] = {}
    for host, kind, count in seen:
        here = processes[str(host)]
        there[str(host)] = str(kind), int(count) * (here if int(count) < here else 1)
    kinds = sorted({f"{count} x {kind}" for kind, count in there.values()})
    if len(kinds) > 1:
        words = "; ".join(f"{host} has {count} x {kind}" for host, (kind, count) in sorted(there.items()))
        raise InputError(
            f"the hosts of this run differ: {words}", hint="ask the scheduler for hosts of one kind"
        )
    kind, count = next(iter(there.values()))
    if len(there) == 1 or chip_of_device_kind(kind).slices is not None:
        return Fleet.local(kind, count * len(there))
    return Fleet.parse(f"{len(there)}x{count}x{chip_of_device_kind(kind).name}")
