"""Which mesh axes split which named dimension.

A parameter declares the names of its dimensions, an activation is pinned by the names of its
dimensions, and these two tables say the rest. Every matmul output must be pinned: without it the
partitioner gathers whole activations or weights and says nothing (docs/how-weighing-works.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

Rules = Mapping[str, tuple[str, ...]]

PARAMETER_RULES: Rules = {
    "layers": (),
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
    "sequence": (),  # inside a block, where heads or hidden units are split
    "residual_sequence": ("tensor",),  # between blocks: norms and residuals split by position
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


def _spec(dims: Sequence[str], mesh: Mesh, rules: Rules) -> PartitionSpec:
    parts: list[str | tuple[str, ...] | None] = []
    for dim in dims:
        axes = tuple(axis for axis in rules[dim] if mesh.shape.get(axis, 1) > 1)
        parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*parts)


def parameter_spec(dims: Sequence[str], mesh: Mesh) -> PartitionSpec:
    """How a parameter with these dimension names lies on the mesh at rest."""
    return _spec(dims, mesh, PARAMETER_RULES)


def activation_spec(dims: Sequence[str], mesh: Mesh) -> PartitionSpec:
    """How an activation with these dimension names lies on the mesh."""
    return _spec(dims, mesh, ACTIVATION_RULES)


def pin(x: Array, mesh: Mesh, *dims: str) -> Array:
    """`x`, constrained to lie as its dimension names say. On one device, `x` itself."""
    if mesh.size == 1:
        return x
    assert len(dims) == x.ndim, f"{x.shape} has {x.ndim} dimensions, names given: {dims}"
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(dims, mesh)))


def gather(x: Array, mesh: Mesh, dtype: jax.typing.DTypeLike, *dims: str) -> Array:
    """A parameter made ready for use: cast to `dtype`, and gathered over `fsdp`.

    The gradient goes back the same road: reduce-scattered over `fsdp` in `dtype`, then cast to the
    parameter's format. (A plain sharding constraint would pin the gradient to the gathered layout,
    an all-reduce of twice the bytes.)
    """
    if mesh.size == 1:
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


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one device that split the batch."""
    return tuple(axis for axis in ACTIVATION_RULES["batch"] if mesh.shape.get(axis, 1) > 1)


def look_up(table: Array, indices: Array, mesh: Mesh) -> Array:
    """Rows of `table` [vocab, embed] (gathered over `fsdp`) at `indices` [batch, sequence].

    Over `tensor` each device looks up the rows it holds, and the sum is scattered by position: the
    layout of residuals. Left to itself the partitioner gathers the whole table.
    """
    if mesh.shape.get("tensor", 1) == 1:
        return table[indices]

    def local(rows: Array, indices: Array) -> Array:
        place = indices - jax.lax.axis_index("tensor") * rows.shape[0]
        here = (place >= 0) & (place < rows.shape[0])
        found = jnp.where(here[..., None], rows[jnp.clip(place, 0, rows.shape[0] - 1)], 0)
        return jax.lax.psum_scatter(found, "tensor", scatter_dimension=1, tiled=True)

    batch = batch_axes(mesh) or None
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec("tensor", None), PartitionSpec(batch, None)),
        out_specs=PartitionSpec(batch, "tensor", None),
    )(table, indices)
