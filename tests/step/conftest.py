from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest
from jax.sharding import Mesh

from meshwright.sharding import mesh_of


@pytest.fixture(scope="module", autouse=True)
def little_optimisation() -> Iterator[None]:
    """Programs that run once: the compiler takes half the time, and rounding is no different in kind."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def mesh() -> Callable[..., Mesh]:
    """A mesh of axes over as many simulated devices as they need."""

    def make(**axes: int) -> Mesh:
        sizes = tuple(axes.items()) or (("data", 1),)
        num_devices = 1
        for _, size in sizes:
            num_devices *= size
        return mesh_of(sizes, jax.devices()[:num_devices])

    return make
