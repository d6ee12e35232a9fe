"""Estimate the rows and the messages of experts for many candidates at once, by the dispatch of each.

Rows are sent once to each fast domain where `domains_of_dispatch` says so, else by choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config import RunConfig, TransformerModel
from meshwright.hardware import CATALOG
from meshwright.planning import seconds_of
from meshwright.predict import Machine

from ._dispatch_sizes import TILE_ROWS, domains_of_dispatch, reached_by, sent_rows

Numbers = NDArray[np.float64]


class Dispatch:
    """Estimate the rows and the messages of each candidate's experts.

    Args:
        mesh: the sizes and strides of the axes, by candidate.
        axes: those that split the experts, outermost first.
        whole: the devices among which whole experts are spread.
    """

    def __init__(
        self,
        config: RunConfig,
        machine: Machine,
        mesh: tuple[Numbers, Numbers],
        axes: Sequence[int],
        whole: Numbers,
    ) -> None:
        model = config.model
        assert isinstance(model, TransformerModel), "only transformers have experts"
        self._model, self._machine, self._whole = model, machine, whole
        sizes, strides = (each[:, axes] for each in mesh)
        self._devices = sizes.prod(axis=1)
        self._domains = _domains_by_candidate(config, machine, sizes, strides)

    def rows_per_token(self, tokens: Numbers) -> Any:
        """Return the rows of the MLP's products per token: those of the experts' buffers.

        Args:
            tokens: of a microbatch on a device, by candidate.
        """
        model = self._model
        factor, experts, chosen = model.capacity_factor, model.num_experts or 0, model.experts_per_token or 1
        shared = model.shared_dim / model.mlp_dim
        if factor is not None:
            return min(factor * chosen, experts) + shared
        members = np.maximum(self._whole / self._domains, 1.0)
        fair = tokens * chosen / members  # rows for each device of a domain
        sent = np.where(self._whole > 1, sent_rows(fair), fair) * members / tokens
        padding = TILE_ROWS / 2 * experts / (self._whole * tokens)  # half a tile of each expert
        return np.minimum(sent + padding, experts) + shared

    def exchange_seconds(self, tokens: Numbers, share: Any, row_bytes: Numbers, members: Numbers) -> Numbers:
        """Return the seconds in which rows reach their experts, by candidate; as long as they take to return.

        Args:
            tokens: of a microbatch on a device.
            share: the rows of its experts' buffers per token.
            row_bytes: the bytes of a row that one device sends.
            members: the devices of one domain that split the experts.
        """
        domains, machine = self._domains, self._machine
        by_domain = domains > 1
        inside = np.where(by_domain, self._devices / domains, self._devices)
        whole = tokens * share * row_bytes
        seconds = seconds_of(machine, "all-to-all", whole, inside, np.minimum(members, inside), 1.0)
        if not by_domain.any():
            return seconds
        share = np.ones_like(tokens)
        for count in np.unique(domains[by_domain]).astype(int).tolist():
            sent = np.minimum(sent_rows(tokens * reached_by(self._model, count)), tokens)
            share = np.where(domains == count, count * sent, share)
        alone = np.ones_like(domains)
        return seconds + seconds_of(machine, "all-to-all", share * row_bytes, domains, alone, 1.0)


def _domains_by_candidate(config: RunConfig, machine: Machine, sizes: Numbers, strides: Numbers) -> Numbers:
    """Return to how many domains each candidate sends a token's row once; 1 where it sends them by choice.

    Args:
        sizes, strides: of the axes that split the experts, by candidate.
    """
    chip = CATALOG.get(machine.name)
    if chip is None:
        return np.ones(len(sizes))
    rows = np.concatenate([sizes, strides], axis=1).astype(int)
    kinds, place = np.unique(rows, axis=0, return_inverse=True)
    found = list[int]()
    for row in kinds.tolist():
        own = list(zip(row[: sizes.shape[1]], row[sizes.shape[1] :], strict=True))
        found.append(domains_of_dispatch(config, own, chip, machine.devices_per_domain))
    return np.array(found, float)[place.reshape(-1)]
