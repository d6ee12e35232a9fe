from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from meshwright.trainer.models import Context


@pytest.fixture
def context(mesh: Callable[..., Mesh]) -> Callable[..., Context]:
    """A run in float32 on one device, or on axes given."""

    def make(*, dropout_key: Any = None, **said: Any) -> Context:
        run = {"remat": "none", "dtype": jnp.float32, "platform": "cpu"}
        run |= {name: said.pop(name) for name in list(said) if name in run}
        return Context(mesh=mesh(**said), dropout_key=dropout_key, **run)

    return make
