"""What every model is: a table of declared parameters, and a loss that is a pure function of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..sharding import AnyMesh, activation_spec, gather, on_each_device, pin

Tree = Any  # a pytree: nested dicts and lists of leaves
Batch = Mapping[str, Array]
TRUNCATION_SIGMAS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter before it exists: shape, the names of its dimensions, how it starts.

    `initial`: "fan_in" draws from a normal truncated at three sigma, scaled by 1/sqrt(fan_in).
    `wide`: used in float32, whatever the format of the computation.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    initial: Literal["fan_in", "zeros", "ones"] = "fan_in"
    fan_in: int = 1
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a model must know of the run: where it lies and in which format it computes.

    `mesh` is the abstract one where the model is called inside a `shard_map` over some axes (`AnyMesh`).
    """

    mesh: AnyMesh
    dtype: jax.typing.DTypeLike
    platform: str  # cuda | tpu | cpu
    remat: str
    zero1: bool = False  # gradients are left split over `data`
    offloads: bool = False  # what is saved for the backward pass waits in host memory
    fp8: bool = False  # the layers' products in eight bits
    dropout_key: Key[Array, ""] | None = None  # None: no dropout
    training: bool = True  # False where held-out data is judged

    def pin(self, x: Array, *dims: str) -> Array:
        """`x`, laid on the mesh by the names of its dimensions."""
        return pin(x, self.mesh, *dims)

    def on_each_device(
        self, local: Callable[..., Any], inputs: tuple[tuple[str, ...], ...], output: tuple[str, ...]
    ) -> Callable[..., Any]:
        """`local`, run on each device's shards of activations laid by the names of their dimensions."""
        specs = tuple(activation_spec(dims, self.mesh) for dims in inputs)
        return on_each_device(local, self.mesh, specs, activation_spec(output, self.mesh))

    def gather(self, x: Array, *dims: str, wide: bool = False) -> Array:
        """A parameter in the format of the computation, in float32 if `wide`, gathered over `fsdp`."""
        return gather(x, self.mesh, jnp.float32 if wide else self.dtype, *dims, zero1=self.zero1)


class Outcome(NamedTuple):
    """What a batch leaves beside its loss: the model's new state, and figures to show by name (scalars)."""

    state: Tree
    metrics: dict[str, Array]


STATELESS = Outcome({}, {})


@runtime_checkable
class Model(Protocol):
    """A model: declared parameters, what it keeps beside them, and a loss."""

    def parameters(self) -> Tree:
        """The tree of `Parameter`."""
        ...

    def state(self) -> Tree:
        """The tree of `Parameter` of what the model keeps from step to step and no gradient moves."""
        ...

    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Mean loss over the batch, in float32, and what else came of it."""
        ...


def _initial(key: Key[Array, ""], parameter: Parameter) -> Array:
    if parameter.initial == "zeros":
        return jnp.zeros(parameter.shape, jnp.float32)
    if parameter.initial == "ones":
        return jnp.ones(parameter.shape, jnp.float32)
    normal = jax.random.truncated_normal(
        key, -TRUNCATION_SIGMAS, TRUNCATION_SIGMAS, parameter.shape, jnp.float32
    )
    return normal / math.sqrt(parameter.fan_in)


def initial_parameters(declared: Tree, key: Key[Array, ""]) -> Tree:
    """Initial values, float32. Each parameter's key depends on its path alone, so the values do not
    depend on the layout, nor on which other parameters there are."""

    def one(path: Any, parameter: Parameter) -> Array:
        name = jax.tree_util.keystr(path)
        return _initial(jax.random.fold_in(key, zlib.crc32(name.encode())), parameter)

    return jax.tree_util.tree_map_with_path(one, declared, is_leaf=lambda x: isinstance(x, Parameter))
