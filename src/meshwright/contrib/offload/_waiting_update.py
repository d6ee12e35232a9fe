"""Update a state of which parts wait in the hosts' memory.

They are copied to the devices for the update and back after it. Nothing but its use keeps XLA from copying
them before the forward pass, and from holding all of them on the devices at once. So the copies wait for the
gradients' norm, and stacked layers are updated one after another in a loop, which fetches a layer's arrays
and puts them back where they were. That needs an optimizer that updates each number by itself (`by_number`);
the moments of the others are all fetched at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from meshwright.config import RunConfig, holds_layers
from meshwright.trainer.models import Parameter, Tree, is_parameter
from meshwright.trainer.step import (
    Change,
    MomentFormats,
    Scalars,
    Update,
    formats_of_moments,
    is_eight_bits,
    on_host,
    optimizer_of,
    parameters_by_path,
)

from .host_layers import in_space

Space = jax.memory.Space
REST = "rest"  # the owner of what is in no stack of layers


def updated(update: Update, old: Tree, change: Change, scalars: Scalars, norm: Array) -> tuple[Tree, Array]:
    """Return the new state in place of `old`, and `norm`, for which the copies wait."""
    waits = [name for name in on_host(update.config) if name in old]
    waiting, norm = jax.lax.optimization_barrier(({name: old[name] for name in waits}, norm))
    old = {**old, **waiting}
    if update.config.optimizer.by_number and update.mesh.shape.get("stage", 1) == 1:
        return _Layers(update, old, change, scalars).updated(), norm
    new = update.whole({**old, **moved_parts(waiting, Space.Device)}, change, scalars)
    return {**new, **moved_parts({name: new[name] for name in waits}, Space.Host)}, norm


class _Layers:
    """Update a state of which stacked layers wait on the host, one layer's arrays at a time.

    The update sees the whole tree each time. Arrays of other layers and parameters have no numbers in it.
    """

    def __init__(self, update: Update, old: Tree, change: Change, scalars: Scalars) -> None:
        config, optimizer = (
            update.config,
            optimizer_of(update.config, update.declared, update.mesh, clips=False),
        )
        self._update, self._scalars = replace(update, optimizer=optimizer), scalars
        self._paths, self._stacks = parameters_by_path(update.declared), _stacks_of(update.declared)
        if (clip := config.optimizer.clip_norm) is not None:
            clipped, _ = optax.clip_by_global_norm(clip).update(change.gradient, optax.EmptyState())
            change = change._replace(gradient=clipped)
        given = {"change": change._asdict(), "state": old}
        named, self._structure = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_eight_bits)
        self._owners = [self._owner(path) for path, _ in named]
        self._waits = [path[0].key == "state" and _is_on_host(path[1:], x, config) for path, x in named]
        self._arrays = [_put(x, Space.Host) if w else x for (_, x), w in zip(named, self._waits, strict=True)]
        self._state_structure = jax.tree.structure(old, is_leaf=is_eight_bits)
        self._first = len(named) - self._state_structure.num_leaves  # of the state's arrays

    def updated(self) -> Tree:
        """Return the new state."""
        new = self._run(REST, self._of(REST), self._scalars.key)
        found = [self._back(i, x) for i, x in enumerate(new, self._first)]
        for stack in dict.fromkeys(self._stacks.values()):
            for i, x in self._updated_stack(stack).items():
                found[i - self._first] = x
        return self._state_structure.unflatten(found)

    def _updated_stack(self, stack: str) -> dict[int, Any]:
        arrays, key = self._of(stack), self._scalars.key
        kept = [i for i in arrays if i >= self._first]

        def update_layer(place: Array, stacks: list[Any]) -> list[Any]:
            now = {**arrays, **dict(zip(kept, stacks, strict=True))}
            layer = {i: jax.tree.map(lambda x: _layer(x, place), x) for i, x in now.items()}
            new = self._run(stack, layer, None if key is None else jax.random.fold_in(key, place))
            backs = [self._back(i, new[i - self._first]) for i in kept]
            put = lambda x, layer: jax.lax.dynamic_update_slice_in_dim(x, layer, place, 0)  # noqa: E731
            return [jax.tree.map(put, now[i], back) for i, back in zip(kept, backs, strict=True)]

        length = jax.tree.leaves(arrays[kept[0]])[0].shape[0]
        return dict(
            zip(kept, jax.lax.fori_loop(0, length, update_layer, [arrays[i] for i in kept]), strict=True)
        )

    def _run(self, owner: str, taken: dict[int, Any], key: Key[Array, ""] | None) -> list[Any]:
        """Update the arrays of one owner and return all of the state, the others' without numbers."""
        arrays = [
            _put(taken[i], Space.Device) if i in taken else x if not self._owners[i] else _without_numbers(x)
            for i, x in enumerate(self._arrays)
        ]
        tree = self._structure.unflatten(arrays)
        update = replace(self._update, formats=self._formats(owner))
        new = update.whole(tree["state"], Change(**tree["change"]), self._scalars._replace(key=key))
        return jax.tree.leaves(new, is_leaf=is_eight_bits)

    def _of(self, owner: str) -> dict[int, Any]:
        return {i: x for i, x in enumerate(self._arrays) if self._owners[i] == owner}

    def _back(self, place: int, x: Any) -> Any:
        return _put(x, Space.Host) if self._waits[place] else x

    def _owner(self, path: tuple[Any, ...]) -> str:
        """Return the stack of layers of which an array is; `REST` of another parameter's, "" of none's."""
        tails = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        return next((self._stacks.get(tail, REST) for tail in tails if tail in self._paths), "")

    def _formats(self, owner: str) -> MomentFormats:
        """Return the formats of one owner's moments, of one layer if it is a stack."""

        def one(path: tuple[Any, ...], p: Parameter) -> Parameter:
            is_own = self._stacks.get(jax.tree_util.keystr(path)) == owner
            return replace(p, shape=(1, *p.shape[1:])) if is_own else p

        declared = jax.tree_util.tree_map_with_path(one, self._update.declared, is_leaf=is_parameter)
        formats = formats_of_moments(self._update.config, declared, self._update.optimizer)
        return formats.only(lambda path: self._owner(path) == owner)


def _stacks_of(declared: Tree) -> dict[str, str]:
    """Return the stack of layers of each stacked parameter, by the parameter's path: its group and length."""
    leaves = jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_parameter)
    return {
        jax.tree_util.keystr(path): f"{path[0].key} {p.shape[0]}"
        for path, p in leaves
        if p.dims[:1] == ("layers",)
    }


def _layer(x: Array, place: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, place, keepdims=True)


def _put(x: Any, space: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, space), x)


def _without_numbers(x: Any) -> Array:
    return jnp.zeros((0,), jnp.float32 if is_eight_bits(x) else x.dtype)


def _is_on_host(path: tuple[Any, ...], x: Any, config: RunConfig) -> bool:
    """Return whether an array of the state waits there, given its path."""
    if path[0].key not in on_host(config) or not (is_eight_bits(x) or x.ndim):
        return False
    return path[0].key != "parameters" or holds_layers(path[1].key)


def moved_parts(state: Tree, space: Any) -> Tree:
    """Copy parts of a state between host memory and the devices; of parameters, only stacked layers."""
    copies = {"parameters": in_space}
    return {name: copies.get(name, moved)(part, space) for name, part in state.items()}


def moved(optimizer: Tree, space: Any) -> Tree:
    """Copy moments between host memory and the devices, within a step; counts (scalars) stay."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, optimizer)
