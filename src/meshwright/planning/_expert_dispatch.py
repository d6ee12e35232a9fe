"""Estimate the messages of experts for many candidates at once, by the dispatch that each would have.

Rows are sent once to each fast domain where `meshwright.config.resolve_dispatch` says so, else by choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.config import RunConfig, TransformerModel, reached_by, sends_once, sent_rows
from meshwright.predict import Machine

from ._messages import seconds_of

Numbers = NDArray[np.float64]


def domains_of_dispatch(
    config: RunConfig, machine: Machine, sizes: Numbers, strides: Numbers, axes: Sequence[int]
) -> Numbers:
    """Return to how many domains each candidate sends a token's row once; 1 where it sends them by choice.

    Args:
        sizes, strides: of the axes of the mesh, by candidate.
        axes: the axes that split the experts, outermost first.
    """
    one, model = np.ones(len(sizes)), config.model
    if not isinstance(model, TransformerModel) or model.num_experts is None or machine.is_tpu:
        return one
    if config.expert_domains is not None:
        return one * config.expert_domains
    of_domain = float(machine.devices_per_domain)
    members = np.clip(np.floor(of_domain / strides), 1, sizes)
    reach = strides * sizes
    lies_evenly = (strides >= of_domain) | (of_domain % reach == 0) | (reach % of_domain == 0)
    is_even = lies_evenly[:, axes].all(axis=1)
    for outer, inner in itertools.combinations(axes, 2):  # the devices of a domain come one after another
        is_even &= (strides[:, outer] > strides[:, inner]) | (members[:, inner] == sizes[:, inner])
    found = np.where(is_even, (sizes / members)[:, axes].prod(axis=1), 1.0)
    for domains in np.unique(found).astype(int).tolist():
        if domains > 1 and not sends_once(model, domains):
            found[found == domains] = 1.0
    return found


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
