"""Optimizer state that is kept in the hosts' memory between steps.

It is copied to the devices for the update and back after it, so its bytes cross the host's link twice a step.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

Tree = Any
HOST = "pinned_host"  # memory that devices read and write without the host's help


def kept_on_host(shardings: Tree, shapes: Tree) -> Tree:
    """`shardings` of optimizer state of these shapes, moments in host memory; counts stay on the devices.

    Devices that are only described list no memories, and make nothing of the name: there, what holds is
    where the step itself puts them (`to_host`) and that the state is donated.
    """

    def one(sharding: NamedSharding, shape: jax.ShapeDtypeStruct) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if shape.ndim else sharding

    return jax.tree.map(one, shardings, shapes)


def to_device(optimizer: Tree) -> Tree:
    """Within a step: moments that lie in host memory, copied to the devices."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if x.ndim else x, optimizer)


def to_host(optimizer: Tree) -> Tree:
    """Within a step: its moments, copied to host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, optimizer)
