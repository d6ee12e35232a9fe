"""A small state of several formats, and checkpoints of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.trainer.checkpoint import Checkpoints

SPECS = {
    "parameters": {"matrix": ("fsdp", "tensor"), "low": (None, "tensor"), "tiny": (("fsdp", "tensor"),)},
    "optimizer": [{"mean": ("tensor", "fsdp")}, {"count": ()}],
    "key": (),
    "step": (),
}


def shardings(mesh: Mesh) -> Any:
    """Of the small state on a mesh; axes that the mesh lacks split nothing."""

    def one(parts: tuple[Any, ...]) -> NamedSharding:
        def known(part: Any) -> Any:
            names = part if isinstance(part, tuple) else (part,)
            return tuple(name for name in names if name in mesh.axis_names) or None

        return NamedSharding(mesh, PartitionSpec(*map(known, parts)))

    return jax.tree.map(one, SPECS, is_leaf=lambda x: isinstance(x, tuple))


def small_values(seed: int = 0) -> Any:
    """On the host: float32, bfloat16, fp8 and integers; one array is not split evenly by its files."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal
    return {
        "parameters": {
            "matrix": normal((8, 16)).astype(np.float32),
            "low": normal((3, 8)).astype(jnp.bfloat16),
            "tiny": normal(16).astype(jnp.float8_e4m3fn),
        },
        "optimizer": [{"mean": normal((8, 8, 5)).astype(np.float32)}, {"count": np.int32(seed)}],
        "key": random.integers(0, 2**32, 2, np.uint32),
        "step": np.int32(seed),
    }


@pytest.fixture
def small_state(mesh: Callable[..., Mesh]) -> Callable[..., Any]:
    """The small state on a mesh of the axes given."""

    def make(seed: int = 0, **axes: int) -> Any:
        return jax.device_put(small_values(seed), shardings(mesh(**axes)))

    return make


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path / "checkpoints")
    yield made
    made.close()


@pytest.fixture(scope="session")
def abstract() -> Callable[..., Any]:
    """A state's shapes, laid out on a mesh, or as it lies."""

    def make(state: Any, mesh: Mesh | None = None) -> Any:
        there = jax.tree.map(lambda x: x.sharding, state) if mesh is None else shardings(mesh)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, there)

    return make


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Any, Any], bool]:
    """Return whether two trees hold the same bytes in the same formats."""

    def same(ours: Any, theirs: Any) -> bool:
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        arrays = [(np.asarray(x), np.asarray(y)) for x, y in pairs]
        return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in arrays)

    return same
