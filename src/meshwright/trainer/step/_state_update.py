"""Update parameters and moments in float32, and keep them in the formats of the config's `state` section.

What waits in the hosts' memory is updated by a room outside the core.

Stochastic rounding: of the two bfloat16 numbers around x one is taken by chance, so that the mean is x
(Gupta et al. 2015, https://arxiv.org/abs/1502.02551). A float32 number has 16 bits more than a bfloat16. A
random number of 16 bits is added to them, and they are cut off: the carry rounds up as often as it should.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key

from meshwright.config import RunConfig, StateConfig, holds_layers
from meshwright.registry import room
from meshwright.trainer.models import Parameter, is_parameter

from ._matrices import is_matrix
from ._optimizer import EightBits, owner_of, parameters_by_path

Tree = Any
CUT = 0xFFFF_0000  # the bits of a float32 that a bfloat16 keeps
OF_ROUNDING = 2**32 - 1  # folded into a step's key; microbatches fold in their index, which is less
ON_HOST = ("optimizer", "master")  # what `offload = "optimizer"` keeps there


def kept_parameters(formats: StateConfig, declared: Tree, parameters: Tree) -> Tree:
    """Return the parts of a new run's state that hold its parameters: `parameters`, and perhaps `master`.

    Matrices and tables are rounded. Norms, biases and parameters with `Parameter.wide` stay in float32.
    """
    if formats.parameters == "fp32":
        return {"parameters": parameters}

    def one(declared: Parameter, x: Array) -> Array:
        return x.astype(jnp.bfloat16) if is_matrix(declared) and not declared.wide else x

    kept = jax.tree.map(one, declared, parameters, is_leaf=is_parameter)
    return {"parameters": kept} if formats.master == "none" else split_master(kept, parameters)


def split_master(kept: Tree, parameters: Tree) -> Tree:
    """Return `parameters` in the formats of `kept`, and as `master` those that it has in another format.

    The master has None in the place of the others.
    """
    return {
        "parameters": jax.tree.map(lambda old, x: x.astype(old.dtype), kept, parameters),
        "master": jax.tree.map(lambda old, x: None if old.dtype == x.dtype else x, kept, parameters),
    }


def with_master(parameters: Tree, master: Tree | None) -> Tree:
    """Return the parameters, and in place of those that have a master copy that copy."""
    if master is None:
        return parameters
    pick = lambda copy, x: x if copy is None else copy  # noqa: E731
    return jax.tree.map(pick, master, parameters, is_leaf=lambda x: x is None)


@runtime_checkable
class _Blocks(Protocol):
    """Keep a moment in eight bits: a room outside the core does."""

    def encoded(self, x: Array, *, signed: bool) -> EightBits: ...

    def decoded(self, kept: EightBits, *, signed: bool) -> Array: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentFormats:
    """The formats in which a run keeps the arrays of its optimizer's state.

    `kept` has a `_Kept` for each array of the state, and the structure of what `optimizer.init` returns.
    Counts of steps, constants and the sums of rows and columns stay as they are in eight bits.
    """

    kept: Tree

    def narrowed(self, state: Tree) -> Tree:
        """Return an optimizer's new state in the formats in which it is kept, rounded to nearest."""
        return jax.tree.map(lambda kept, x: kept.narrow(x), self.kept, state)

    def only(self, is_own: Callable[[tuple[Any, ...]], bool]) -> MomentFormats:
        """Return the formats of those arrays whose paths are of some kind; the others stay as they are."""
        pick = lambda path, kept: kept if is_own(path) else _Kept()  # noqa: E731
        return MomentFormats(kept=jax.tree_util.tree_map_with_path(pick, self.kept))

    def widened(self, state: Tree) -> Tree:
        """Return a state as the optimizer reads it: moments in float32."""
        return jax.tree.map(lambda kept, x: kept.wide(x), self.kept, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The format of one array; `blocks` of a moment in eight bits, None for the others."""

    is_bf16: bool = False
    signed: bool = True
    blocks: _Blocks | None = None

    def narrow(self, x: Array) -> Any:
        if self.blocks is not None:
            return self.blocks.encoded(x, signed=self.signed)
        return x.astype(jnp.bfloat16) if self.is_bf16 else x

    def wide(self, x: Any) -> Array:
        if self.blocks is not None:
            return self.blocks.decoded(x, signed=self.signed)
        return x.astype(jnp.float32) if self.is_bf16 else x


def formats_of_moments(config: RunConfig, declared: Tree, optimizer: Any) -> MomentFormats:
    """Return the formats of the optimizer's state, given the declarations of its parameters."""
    signs = {moment.name: moment.signed for moment in config.optimizer.moments()}
    parameters, formats = parameters_by_path(declared), config.state.moments
    shapes = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), declared, is_leaf=is_parameter
    )

    def one(path: tuple[Any, ...], x: Any) -> _Kept:
        owned = owner_of(path, parameters)
        if owned is None or owned[0] not in signs or not x.ndim:
            return _Kept()
        name, parameter = owned
        if formats == "8bit" and x.shape == parameter.shape:
            return _Kept(signed=signs[name], blocks=room("eight_bit_states").blocks_of(parameter))
        return _Kept(is_bf16=formats == "bf16")

    return MomentFormats(kept=jax.tree_util.tree_map_with_path(one, jax.eval_shape(optimizer.init, shapes)))


def widened(tree: Tree) -> Tree:
    """Return a tree whose bfloat16 arrays are float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def rounded_as(old: Tree, new: Tree, formats: StateConfig, key: Key[Array, ""]) -> Tree:
    """Return `new` in the formats of `old`'s arrays, rounded as `formats` says.

    Args:
        old, new: trees of the same structure and shapes.
        key: of the step; arrays draw different numbers from it.
    """
    leaves, structure = jax.tree.flatten(new)
    keys = iter(range(len(leaves)))

    def one(old: Array, new: Array) -> Array:
        index = next(keys)
        if old.dtype == new.dtype or formats.rounding == "nearest":
            return new.astype(old.dtype)
        return by_chance(new, jax.random.fold_in(key, index))

    return structure.unflatten([*map(one, jax.tree.leaves(old), leaves)])


def by_chance(x: Array, key: Key[Array, ""]) -> Array:
    """Round a float32 array to bfloat16 up or down by chance, so that the mean is the array.

    Infinities and NaN stay what they are.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    drawn = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type((bits + drawn) & jnp.uint32(CUT), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


class Change(NamedTuple):
    """Hold what a step has found: the gradient, where experts have too many tokens, the new model state."""

    gradient: Tree
    excess: Tree
    model_state: Tree


class Scalars(NamedTuple):
    """Hold an update's learning rate, whether it is applied, and a key if it rounds by chance."""

    rate: Array
    applied: Array
    key: Key[Array, ""] | None


@dataclass(frozen=True)
class Update:
    """The update of a run's state. `declared`: its trained parameters, which `mesh` holds."""

    config: RunConfig
    declared: Tree
    mesh: Mesh
    optimizer: optax.GradientTransformation
    formats: MomentFormats

    def __call__(self, old: Tree, change: Change, scalars: Scalars, norm: Array) -> tuple[Tree, Array]:
        """Return the new state in place of `old`, and `norm`, for which the copies wait."""
        if not any(name in old for name in on_host(self.config)):
            return self.whole(old, change, scalars), norm
        return room("offload").updated(self, old, change, scalars, norm)

    def whole(self, old: Tree, change: Change, scalars: Scalars) -> Tree:
        """Return the new state from one that is on the devices."""
        state, bias_rate = self.config.state, getattr(self.config.model, "router_bias_rate", 0.0)
        wide = widened(with_master(old["parameters"], old.get("master")))
        updates, moments = self.optimizer.update(
            change.gradient, self.formats.widened(old["optimizer"]), wide
        )
        updates = jax.tree.map(lambda u: scalars.rate * u, updates)
        parameters = optax.apply_updates(wide, updates)
        if bias_rate:
            parameters = room("experts").with_moved_bias(parameters, wide, change.excess, bias_rate)
        if state.moments == "8bit":
            moments = self.formats.narrowed(moments)
        new: Tree = {"parameters": parameters, "optimizer": moments, "model_state": change.model_state}
        if "master" in old:
            new |= split_master(old["parameters"], parameters)
        if scalars.key is not None:
            new = rounded_as(old, new, state, jax.random.fold_in(scalars.key, OF_ROUNDING))
        return jax.tree.map(lambda new, old: jnp.where(scalars.applied, new, old), new, old)


def on_host(config: RunConfig) -> tuple[str, ...]:
    """Return the parts of the state that wait in host memory; of parameters, only stacked layers."""
    return (*(ON_HOST * config.waits("moments")), *(("parameters",) * config.waits("parameters")))


def stacked_layers(parameters: Tree) -> Tree:
    """Return the groups of parameters that are stacked layers."""
    return {name: group for name, group in parameters.items() if holds_layers(name)}
