"""Ask the room of experts for the rows of their buffers and their messages, for a model that has any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.config import RunConfig, TransformerModel
from meshwright.predict import Machine

Numbers = NDArray[np.float64]


class Dispatch(Protocol):
    """Estimate experts by candidate, in a room outside the core."""

    def rows_per_token(self, tokens: Numbers) -> Any:
        """Return the rows of the MLP's products per token: those of the experts' buffers."""
        ...

    def exchange_seconds(self, tokens: Numbers, share: Any, row_bytes: Numbers, members: Numbers) -> Numbers:
        """Return the seconds in which rows reach their experts; as long as they take to return."""
        ...


def dispatch_of(
    config: RunConfig, machine: Machine, mesh: tuple[Numbers, Numbers], axes: Sequence[int], whole: Numbers
) -> Dispatch | None:
    """Return how each candidate sends rows to experts; None for a model without experts.

    Args:
        mesh: the sizes and strides of the axes, by candidate.
        axes: those that split the experts, outermost first.
        whole: the devices among which whole experts are spread.
    """
    if not isinstance(config.model, TransformerModel) or config.model.num_experts is None:
        return None
    from meshwright.registry import room

    return room("experts").Dispatch(config, machine, mesh, axes, whole)
