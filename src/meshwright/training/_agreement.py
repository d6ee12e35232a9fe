"""A signal that one process was sent, told to all through the devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..processes import Alone
from ._feed import put


class Agreement:
    """The first signal that any process was sent, in all of them after the same step.

    It goes through the devices, in the order of the steps: a message beside them could reach one process
    before and another after the step is begun. Alone, nothing is run.

    Args:
        waits: whether the answer is that of this step. Else it is that of the step before, so that the host
            may run one step ahead of the devices.
    """

    def __init__(self, mesh: Mesh, peers: Alone, *, waits: bool) -> None:
        self._alone = peers.count == 1
        if self._alone:
            return
        self._before: jax.Array | None = None
        self._waits = waits
        self._each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._num_devices = mesh.size
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def on(self, signal: int | None) -> int | None:
        """The signal of this or another process; None where none was sent one."""
        if self._alone:
            return signal

        numbers = np.full(self._num_devices, signal or 0, np.int32)
        now = self._largest(put(numbers, self._each))
        asked, self._before = (now if self._waits else self._before), now
        return int(asked) or None if asked is not None else None
