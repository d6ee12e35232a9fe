"""Define the interface of a model: a table of declared parameters and a pure loss function of them."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from meshwright.config import EXPERT_DIMS, FoldedExperts
from meshwright.sharding import AnyMesh, activation_spec, gather, on_each_device, pin, whole_size

Tree = Any  # a pytree: nested dicts and lists of leaves
Batch = Mapping[str, Array]
TRUNCATION_SIGMAS = 3.0
LEAST_STEP, MOST_STEP = 1e-3, 1e-1
RESIDUAL = ("batch", "residual_sequence", "embed")  # dimensions of an activation between blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The declaration of one parameter: its shape, its dimension names and its initialisation.

    `initial`: "fan_in" draws from a normal distribution truncated at three sigma, scaled by
    gain/sqrt(fan_in); "ones" are `gain`. "rates" are logarithms of numbers drawn evenly from 1 to 16, by
    which states decay in a unit of time; softplus of "steps" gives times from `LEAST_STEP` to `MOST_STEP`,
    drawn evenly by their logarithms (Mamba-2, https://arxiv.org/abs/2405.21060, and its code).
    `wide`: the parameter is used in float32, whatever the compute format.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    initial: Literal["fan_in", "zeros", "ones", "rates", "steps"] = "fan_in"
    fan_in: int = 1
    gain: float = 1.0
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The settings of a run that a model depends on: its mesh, its compute format and its policies.

    `mesh` is an abstract mesh if the model is called inside a `shard_map` over some axes (`AnyMesh`).
    """

    mesh: AnyMesh
    dtype: jax.typing.DTypeLike
    platform: str  # cuda | tpu | cpu
    compute_capability: tuple[int, int] = (0, 0)  # of an NVIDIA target, such as (9, 0)
    remat: str
    layer_loop: str = "auto"
    fold_experts: FoldedExperts = "none"
    expert_domains: int = 1  # fast domains to each of which a token's row is sent once
    zero1: bool = False  # gradients stay sharded over `data` and `context`
    offloads: bool = False  # activations saved for the backward pass are kept in host memory
    fp8: bool = False  # the layers' matrix products run in eight bits
    wide_gradients: bool = False  # gradients of weights are float32 from the product that makes them
    adapter_scale: float | None = None  # of what adapters add; None: no adapters, and nothing is frozen
    dropout_key: Key[Array, ""] | None = None  # None: no dropout
    training: bool = True  # False for evaluation on held-out data
    sums: Mapping[str, Tree] | None = None  # of gradients, by group of parameters (`Model.summed`)
    in_loop: bool = False  # a step runs the model once for each of several microbatches
    held: Any = None  # stacked layers in host memory, by stretch; within a stretch, its own

    def pin(self, x: Array, *dims: str) -> Array:
        """Constrain the sharding of `x` by the names of its dimensions."""
        return pin(x, self.mesh, *dims)

    def on_each_device(
        self, local: Callable[..., Any], inputs: tuple[tuple[str, ...], ...], output: tuple[str, ...]
    ) -> Callable[..., Any]:
        """Wrap `local` to run on each device's shards; dimension names set the activations' shardings."""
        specs = tuple(activation_spec(dims, self.mesh) for dims in inputs)
        return on_each_device(local, self.mesh, specs, activation_spec(output, self.mesh))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Return the axes of more than one device that spread whole experts, some perhaps manual outside."""
        return tuple(axis for axis in EXPERT_DIMS[self.fold_experts][1] if whole_size(self.mesh, axis) > 1)

    @property
    def widens(self) -> bool:
        """Return whether the model's own parameters get float32 gradients; beside adapters they get none."""
        return self.wide_gradients and self.adapter_scale is None

    def gather(self, x: Array, *dims: str, wide: bool = False, adapter: bool = False) -> Array:
        """Cast a parameter to the compute format (float32 if `wide`) and all-gather it over `fsdp`.

        If its gradient is to be float32, so is the result, for `product` and others that round it themselves.

        Args:
            adapter: the parameter is an adapter's, and trained.
        """
        dtype, widens = jnp.float32 if wide else self.dtype, self.wide_gradients if adapter else self.widens
        return gather(x, self.mesh, dtype, *dims, zero1=self.zero1, wide_gradient=widens)


class Outcome(NamedTuple):
    """The results of a batch other than its loss: the new model state, and scalar metrics by name."""

    state: Tree
    metrics: dict[str, Array]


STATELESS = Outcome({}, {})


class Model(ABC):
    """A model: its declared parameters, its state without gradients, and its loss.

    Args:
        config: the record of the config's `model` section.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def parameters(self) -> Tree:
        """Return the tree of `Parameter` declarations."""

    def state(self) -> Tree:
        """Declare the model state: arrays kept between steps, not updated by gradients. Empty by default."""
        return {}

    def summed(self, context: Context) -> tuple[str, ...]:
        """Return the groups of parameters whose gradients are added to their sums where they are made.

        If the context has `sums` of them, float32 arrays of their shapes, the gradient with respect to `sums`
        is `sums` with the groups' gradients added, and the groups have no other. None by default.
        """
        return ()

    @abstractmethod
    def loss(
        self, parameters: Tree, state: Tree, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Outcome]:
        """Return the mean loss over the batch in float32, and the batch's `Outcome`."""


def with_experts_over(declared: Tree, fold_experts: FoldedExperts) -> Tree:
    """Return declarations whose dim of experts is named after the axes that split it."""
    name, _ = EXPERT_DIMS[fold_experts]

    def one(p: Parameter) -> Parameter:
        return replace(p, dims=tuple(name if dim == "experts" else dim for dim in p.dims))

    return jax.tree.map(one, declared, is_leaf=is_parameter)


def initial_parameters(declared: Tree, key: Key[Array, ""]) -> Tree:
    """Draw the initial values of the declared parameters, in float32.

    Each parameter's random key depends only on its path. So its values depend neither on the layout nor on
    the other parameters.
    """

    def one(path: Any, parameter: Parameter) -> Array:
        if parameter.initial in ("zeros", "ones"):
            value = 0.0 if parameter.initial == "zeros" else parameter.gain
            return jnp.full(parameter.shape, value, jnp.float32)
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        if parameter.initial == "rates":
            return jnp.log(jax.random.uniform(own, parameter.shape, jnp.float32, 1.0, 16.0))
        if parameter.initial == "steps":
            limits = math.log(LEAST_STEP), math.log(MOST_STEP)
            return jnp.log(jnp.expm1(jnp.exp(jax.random.uniform(own, parameter.shape, jnp.float32, *limits))))
        limits = -TRUNCATION_SIGMAS, TRUNCATION_SIGMAS
        normal = jax.random.truncated_normal(own, *limits, parameter.shape, jnp.float32)
        return normal * (parameter.gain / math.sqrt(parameter.fan_in))

    return jax.tree_util.tree_map_with_path(one, declared, is_leaf=is_parameter)


def is_parameter(leaf: object) -> bool:
    """Return whether `leaf` is a `Parameter`, a leaf of a model's declarations."""
    return isinstance(leaf, Parameter)
