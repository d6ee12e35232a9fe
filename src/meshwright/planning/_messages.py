"""Price a collective over some axes for many candidates at once, as `predict` prices it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.predict import Machine, collective_seconds

Numbers = NDArray[np.float64]


def seconds_of(
    machine: Machine, kind: str, whole: Numbers, sizes: Numbers, members: Numbers, times: float | None
) -> Numbers:
    """Return the seconds of a collective of one kind, by candidate; 0 in a group of one device.

    Args:
        whole: the bytes of the whole array.
        sizes, members: devices of a group, and those of them in one fast domain.
        times: the share of the array that one device sends; (n - 1) / n if None.

    Raises:
        InputError: a group spans a link for which the catalog has no rate.
    """
    seconds = np.zeros_like(sizes)
    for size, inside in np.unique(np.stack([sizes, members], axis=1), axis=0).tolist():
        if size == 1:
            continue
        rows = (sizes == size) & (members == inside)
        share = (size - 1) / size if times is None else times
        of_kind = (int(size), int(inside), int(np.ceil(size / inside)))
        seconds[rows] = _of_one_kind(machine, kind, whole[rows], share, *of_kind)
    return seconds * machine.factors.of(kind)


def _of_one_kind(
    machine: Machine, kind: str, whole: Numbers, share: float, size: int, members: int, domains: int
) -> Numbers:
    """Return the seconds of a collective in groups of one size, by candidate.

    Between hosts of GPUs, NCCL's rings use both links at once. Between TPU slices, XLA reduces inside each,
    then joins each device's part with its like in the other slices, then gathers inside.

    Args:
        whole: the bytes of the whole array.
        share: the share of it that one device sends.
        size, members, domains: devices of a group, those of them in one fast domain, and its domains.

    Raises:
        InputError: the group spans a link for which the catalog has no rate.
    """
    permute = kind == "collective-permute"
    inside = np.zeros_like(whole)
    if domains == 1 or (members > 1 and not permute):
        link = machine.inside_rate(2 if permute else members)
        if link is None:
            raise _no_rate(machine, "inside a domain")
        sent = whole * share
        if domains > 1 and kind == "all-to-all":
            sent = whole * (members - 1) / size
        rate = machine.rates.collective_for(kind, size if domains == 1 else members)
        inside = np.asarray(collective_seconds(rate, wire_bytes=sent, bytes_per_second=link))
    if domains == 1:
        return inside
    network = machine.between_bytes_per_second
    if network is None:
        raise _no_rate(machine, "between domains")
    network *= machine.shared.network_efficiency
    alpha = machine.shared.network_alpha_seconds * (domains - 1)
    if permute:
        return np.maximum(inside, whole / network) + alpha
    if kind == "all-to-all":
        return np.maximum(inside, whole * (size - members) / size / network) + alpha
    if machine.is_tpu:
        parts = (2 if kind == "all-reduce" else 1) * (domains - 1) / domains
        return inside + whole * parts / members / network + alpha
    in_trees = kind == "all-reduce" and domains == 2
    between = whole * (1.0 if in_trees else share) / members / network
    return np.maximum(inside, between) + alpha


def _no_rate(machine: Machine, where: str) -> InputError:
    return InputError(
        f"the catalog has no figure for the link {where} of {machine.name}",
        hint="choose a fleet that is one fast domain, or a chip whose links are known",
    )
