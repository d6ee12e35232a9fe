"""Choose the layouts that a person would try first, so that a plan always compiles them.

They are `fsdp` alone, and `fsdp` with `tensor` inside a host, each with full and with no rematerialisation,
without stages, offload or ZeRO-1. Of several TPU slices, both have `data` over the slices. Whatever a search
prefers, its answer then stands beside these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware import Fleet

from ._space import DATA, FSDP, SETTINGS, TENSOR, Candidates

_REMAT = ("full", "none")
_PLAIN = {"zero1": "false", "offload": "none"}


def simplest_rows(candidates: Candidates, fleet: Fleet, promise: NDArray[np.float64]) -> list[int]:
    """Return of each kind of simple layout and each of two policies the most promising candidate.

    Args:
        promise: of each candidate; its size of `tensor` and its microbatch are chosen by it.

    >>> from meshwright.config import load_config
    >>> from meshwright.planning import space_of
    >>> run, fleet = load_config("llama3-8b"), Fleet.parse("16xH100")
    >>> found = space_of(run, fleet).candidates
    >>> rows = simplest_rows(found, fleet, -found.sizes[:, TENSOR].astype(float))
    >>> [str(found.layout(row)) for row in rows]
    ['fsdp=16', 'fsdp=16', 'fsdp=8,tensor=2', 'fsdp=8,tensor=2']
    """
    plain = (candidates.inner == TENSOR) & (candidates.chunks == 1)
    for name, value in _PLAIN.items():
        plain &= candidates.settings[name] == SETTINGS[name].index(value)
    others = [axis for axis in range(candidates.sizes.shape[1]) if axis not in (DATA, FSDP, TENSOR)]
    plain &= (candidates.sizes[:, others] == 1).all(axis=1)
    plain &= candidates.size(DATA) == (fleet.num_domains if fleet.domain == "slice" else 1)
    fsdp, tensor = candidates.size(FSDP), candidates.size(TENSOR)
    in_host = (fsdp > 1) & (tensor > 1) & (fleet.chips_per_host % tensor == 0)
    rows: list[int] = []
    for kind in (plain & (tensor == 1), plain & in_host):
        for policy in _REMAT:
            rows += _best(kind & (candidates.settings["remat"] == _place(policy)), promise)
    return rows


def _place(policy: str) -> int:
    return SETTINGS["remat"].index(policy)


def _best(which: NDArray[np.bool_], promise: NDArray[np.float64]) -> Sequence[int]:
    rows = np.flatnonzero(which)
    return [int(rows[np.argmax(promise[rows])])] if len(rows) else []
