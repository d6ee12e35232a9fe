"""Estimate the messages of experts for many candidates at once, by the dispatch that each would have.

Rows are sent once to each fast domain where `meshwright.config.resolve_dispatch` says so, else by choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.config import RunConfig, TransformerModel, domains_of_dispatch, reached_by, sent_rows
from meshwright.hardware import CATALOG
from meshwright.predict import Machine

from ._messages import seconds_of

Numbers = NDArray[np.float64]


def domains_by_candidate(
    config: RunConfig, machine: Machine, sizes: Numbers, strides: Numbers, axes: Sequence[int]
) -> Numbers:
    """Return to how many domains each candidate sends a token's row once; 1 where it sends them by choice.

    Args:
        sizes, strides: of the axes of the mesh, by candidate.
        axes: the axes that split the experts, outermost first.
    """
    chip = CATALOG.get(machine.name)
    if chip is None:
        return np.ones(len(sizes))
    rows = np.concatenate([sizes[:, axes], strides[:, axes]], axis=1).astype(int)
    kinds, place = np.unique(rows, axis=0, return_inverse=True)
    found = list[int]()
    for row in kinds.tolist():
        own = list(zip(row[: len(axes)], row[len(axes) :], strict=True))
        found.append(domains_of_dispatch(config, own, chip, machine.devices_per_domain))
    return np.array(found, float)[place.reshape(-1)]


def exchange_seconds(
    config: RunConfig,
    machine: Machine,
    rows: tuple[Numbers, Numbers],
    row_bytes: Numbers,
    groups: tuple[Numbers, Numbers, Numbers],
) -> Numbers:
    """Return the seconds in which rows reach their experts, by candidate; as long as they take to return.

    Args:
        rows: tokens of a microbatch on a device, and rows of its experts' buffers.
        row_bytes: the bytes of a row that one device sends.
        groups: the devices that split the experts, those of them in one domain, and the domains to each of
            which a row is sent once.
    """
    (tokens, buffered), (devices, members, domains) = rows, groups
    by_domain = domains > 1
    inside = np.where(by_domain, devices / domains, devices)
    whole = buffered * row_bytes
    seconds = seconds_of(machine, "all-to-all", whole, inside, np.minimum(members, inside), 1.0)
    if not by_domain.any():
        return seconds
    model = config.model
    assert isinstance(model, TransformerModel), "only transformers have experts"
    share = np.ones_like(tokens)
    for count in np.unique(domains[by_domain]).astype(int).tolist():
        sent = np.minimum(sent_rows(tokens * reached_by(model, count)), tokens)
        share = np.where(domains == count, count * sent, share)
    return seconds + seconds_of(machine, "all-to-all", share * row_bytes, domains, np.ones_like(domains), 1.0)
