"""Describe a step's arguments without making them: a function's results as shapes, placed on a mesh.

Used by: users, as `mw.abstract` and `mw.place`, for the arguments of `mw.weigh(step, args=..., on=...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.config import Problem, input_error
from meshwright.contrib.sharding_words import does_not_divide, indivisible
from meshwright.errors import InputError
from meshwright.sharding import axes_of

Chosen = Callable[[str, Any], PartitionSpec]


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def abstract(init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `init(*args, **kwargs)` returns, with a `jax.ShapeDtypeStruct` for each array.

    Nothing is computed, so that a model of any size costs no memory. As `jax.eval_shape`, but arguments and
    results may have leaves that are no arrays, which stay as they are.

    >>> import jax.numpy as jnp
    >>> abstract(lambda width: {"w": jnp.ones((width, 8)), "act": "gelu"}, 1024)["w"].shape
    (1024, 8)
    """
    given, tree = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in given if _is_array(leaf)]
    left: list[Any] = []  # the result's leaves that are no arrays, and its structure

    def of_arrays(*traced: Any) -> list[Any]:
        each = iter(traced)
        args, kwargs = jax.tree.unflatten(tree, [next(each) if _is_array(leaf) else leaf for leaf in given])
        leaves, structure = jax.tree.flatten(init(*args, **kwargs))
        left[:] = [structure, *(None if _is_array(leaf) else leaf for leaf in leaves)]
        return [leaf for leaf in leaves if _is_array(leaf)]

    shapes = iter(jax.eval_shape(of_arrays, *arrays))
    structure, *fixed = left
    return jax.tree.unflatten(structure, [next(shapes) if leaf is None else leaf for leaf in fixed])


def place(mesh: Mesh | AbstractMesh, tree: Any, spec: PartitionSpec | Chosen | Any) -> Any:
    """Return the arrays of a tree as shapes that lie on a mesh.

    Args:
        mesh: a `jax.sharding.Mesh`, or an `AbstractMesh`, which needs no devices.
        tree: arrays or shapes, anywhere in it; other leaves stay as they are.
        spec: a `PartitionSpec` for every array; or a tree of them, a prefix of the arrays'; or a function
            that gets the path (`"['layers'][0]['w']"`) and the array and returns one. Arrays without
            dimensions are on every device.

    Returns:
        The tree with a `jax.ShapeDtypeStruct` for each array, whose sharding is over the mesh.

    Raises:
        InputError: an axis is not one of the mesh, or a spec has more dimensions than an array, or does not
            divide one. One error lists all of them.

    >>> import jax.numpy as jnp
    >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
    >>> place(mesh, jnp.ones((64, 4)), jax.sharding.PartitionSpec("data")).sharding.shard_shape((64, 4))
    (8, 4)
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    specs: list[Any]
    if isinstance(spec, PartitionSpec):
        specs = [spec] * len(leaves)
    elif callable(spec):
        specs = [
            spec(name, leaf) if _is_array(leaf) else None for name, leaf in zip(names, leaves, strict=True)
        ]
    else:
        specs = _specs_of_prefix(spec, tree)
    problems: list[Problem] = []
    placed: list[Any] = []
    for name, leaf, given in zip(names, leaves, specs, strict=True):
        if not _is_array(leaf):
            placed.append(leaf)
            continue
        own = PartitionSpec() if given is None or not leaf.shape else given
        found = _problems(name, leaf, own, dict(mesh.shape))
        problems += found
        if not found:
            placed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, own)))
    if problems:
        shown = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise input_error(f"placing arrays on the mesh {shown}", problems)
    return jax.tree.unflatten(structure, placed)


def _specs_of_prefix(spec: Any, tree: Any) -> list[Any]:
    """Return the spec of each leaf of a tree from a prefix of it."""
    specs: list[Any] = []

    def is_spec(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec)

    def repeat(one: Any, part: Any) -> None:
        specs.extend([one] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(repeat, spec, tree, is_leaf=is_spec)
    except ValueError as differs:
        raise InputError(
            f"the specs have another structure than the arrays: {differs}",
            hint="give a PartitionSpec, a tree of them that is a prefix of the arrays', or a function",
        ) from differs
    return specs


def _problems(name: str, leaf: Any, spec: PartitionSpec, sizes: dict[str, int]) -> list[Problem]:
    where = name or "the array"
    unknown = sorted({axis for entry in spec for axis in axes_of(entry)} - sizes.keys())
    if unknown:
        return [(where, f"{spec} names {', '.join(unknown)}", f"the mesh has {', '.join(sizes)}")]
    if len(spec) > len(leaf.shape):
        return [(where, f"{spec} has more dimensions than {leaf.shape}", "leave out the last ones")]
    return [
        (where, *does_not_divide(dim, leaf.shape[dim], axes))
        for dim, axes in indivisible(leaf.shape, tuple(spec), sizes)
    ]
