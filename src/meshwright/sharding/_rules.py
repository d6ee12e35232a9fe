"""Which mesh axes split which named dimension.

A parameter declares the names of its dimensions, an activation is pinned by the names of its
dimensions, and these two tables say the rest. Every matmul output must be pinned: without it the
partitioner gathers whole activations or weights and says nothing (docs/how-weighing-works.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices; or, inside a `shard_map` over some of its axes, what `jax.sharding.get_abstract_mesh()`
gives: along those (its `manual_axes`) the code is one shard's already, and there is nothing left to split."""
Rules = Mapping[str, tuple[str, ...]]

PARAMETER_RULES: Rules = {
    "layers": ("stage",),
    "embed": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "vocab": ("tensor",),
    "positions": (),
    "one": (),
    "channels_out": (),
    "channels_in": (),
    "height": (),
    "width": (),
}
ACTIVATION_RULES: Rules = {
    "batch": ("data", "fsdp"),
    "sequence": ("context",),  # inside a block, where heads or hidden units are split too
    "residual_sequence": ("context", "tensor"),  # between blocks: norms and residuals split by position
    "embed": (),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "vocab": ("tensor",),
    "microbatch": (),
    "replica_rows": (),  # of one replica, behind `batch` in groups of a replica each
    "channels": (),
    "height": (),
    "width": (),
}


def axis_size(mesh: AnyMesh, axis: str) -> int:
    """Shards along an axis that are still to be made: 1 where the mesh has none, or it is manual."""
    return 1 if axis in mesh.manual_axes else mesh.shape.get(axis, 1)


def num_shards(mesh: AnyMesh) -> int:
    """The product over all axes of `axis_size`."""
    return math.prod(axis_size(mesh, axis) for axis in mesh.axis_names)


def on_each_device(local: Callable[..., Any], mesh: AnyMesh, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """`local`, run on each device's shards (`jax.shard_map` over all axes that are not manual yet).

    Args:
        inputs: PartitionSpecs of the arguments.
        outputs: of the results.
    """
    if num_shards(mesh) == 1:
        return local
    left = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    return jax.shard_map(
        local, mesh=mesh, in_specs=inputs, out_specs=outputs, axis_names=left, check_vma=False
    )


def _spec(dims: Sequence[str], mesh: AnyMesh, rules: Rules) -> PartitionSpec:
    parts: list[str | tuple[str, ...] | None] = []
    for dim in dims:
        axes = tuple(axis for axis in rules[dim] if axis_size(mesh, axis) > 1)
        parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*parts)


def parameter_spec(dims: Sequence[str], mesh: AnyMesh) -> PartitionSpec:
    """How a parameter with these dimension names lies on the mesh at rest."""
    return _spec(dims, mesh, PARAMETER_RULES)


def activation_spec(dims: Sequence[str], mesh: AnyMesh) -> PartitionSpec:
    """How an activation with these dimension names lies on the mesh."""
    return _spec(dims, mesh, ACTIVATION_RULES)


def pin(x: Array, mesh: AnyMesh, *dims: str) -> Array:
    """`x`, constrained to lie as its dimension names say. On one device, `x` itself."""
    if num_shards(mesh) == 1:
        return x
    assert len(dims) == x.ndim, f"{x.shape} has {x.ndim} dimensions, names given: {dims}"
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(dims, mesh)))


def gather(x: Array, mesh: AnyMesh, dtype: jax.typing.DTypeLike, *dims: str) -> Array:
    """A parameter made ready for use: cast to `dtype`, and gathered over `fsdp`.

    The gradient goes back the same road: reduce-scattered over `fsdp` in `dtype`, then cast to the
    parameter's format. (A plain sharding constraint would pin the gradient to the gathered layout,
    an all-reduce of twice the bytes.)
    """
    if num_shards(mesh) == 1:
        return x.astype(dtype)
    at_rest = NamedSharding(mesh, parameter_spec(dims, mesh))
    in_use = NamedSharding(mesh, _spec(dims, mesh, {**PARAMETER_RULES, "embed": ()}))
    stored = x.dtype

    @jax.custom_vjp
    def use(x: Array) -> Array:
        cast = jax.lax.with_sharding_constraint(x.astype(dtype), at_rest)
        return jax.lax.with_sharding_constraint(cast, in_use)

    def backward(_: None, gradient: Array) -> tuple[Array]:
        return (jax.lax.with_sharding_constraint(gradient, at_rest).astype(stored),)

    use.defvjp(lambda x: (use(x), None), backward)
    return use(x)


def _split_by(mesh: AnyMesh, dim: str) -> tuple[str, ...]:
    return tuple(axis for axis in ACTIVATION_RULES[dim] if axis_size(mesh, axis) > 1)


def batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes of more than one device that split the batch."""
    return _split_by(mesh, "batch")


def token_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes of more than one device that split tokens inside a block: of the batch and of positions."""
    return _split_by(mesh, "batch") + _split_by(mesh, "sequence")


def look_up(table: Array, indices: Array, mesh: AnyMesh) -> Array:
    """Rows of `table` [vocab, embed] (gathered over `fsdp`) at `indices` [batch, sequence].

    Over `tensor` each device looks up the rows it holds, and the sum is scattered by position: the
    layout of residuals. Left to itself the partitioner gathers the whole table.
    """
    if axis_size(mesh, "tensor") == 1:
        return table[indices]

    def local(rows: Array, indices: Array) -> Array:
        place = indices - jax.lax.axis_index("tensor") * rows.shape[0]
        here = (place >= 0) & (place < rows.shape[0])
        found = jnp.where(here[..., None], rows[jnp.clip(place, 0, rows.shape[0] - 1)], 0)
        return jax.lax.psum_scatter(found, "tensor", scatter_dimension=1, tiled=True)

    split = activation_spec(("batch", "sequence"), mesh)
    residual = activation_spec(("batch", "residual_sequence", "embed"), mesh)
    return on_each_device(local, mesh, (PartitionSpec("tensor", None), split), residual)(table, indices)
