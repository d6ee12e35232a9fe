"""Map named dimensions to the mesh axes that split them, and build the mesh of a layout.

A parameter declares the names of its dimensions, and an activation is pinned by the names of its dimensions.
Tables in `config` map these names to mesh axes. Every matmul output must be pinned: otherwise the partitioner
silently gathers whole activations or weights (docs/explanation/how-weighing-works.md).

Imports: `config` (axis names and rules), jax. Used by: `trainer` and `worker`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from meshwright.config import (
    ACTIVATION_RULES,
    EXPERT_DIMS,
    PARAMETER_RULES,
    REPLICA_AXES,
    ZERO1_AXES,
    Rules,
)

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices; or, inside a `shard_map` over some of its axes, what `jax.sharding.get_abstract_mesh()`
gives: along those (its `manual_axes`) the code is one shard's already, and there is nothing left to split."""
TABLES = ("embedding", "head")
"""The parameters whose rows are a vocabulary."""
TABLE_ROWS = ("vocab", "token")
"""The names of their first dim: of one that gives logits, and of one in which tokens are only looked up."""
EXPERTS = tuple(dim for dim, _ in EXPERT_DIMS.values())
"""The names of the dim that counts experts."""
KV_HEADS = "kv_heads"
"""The dimension of key-value heads. Where `tensor` has more devices, each head serves several of them."""


def axis_size(mesh: AnyMesh, axis: str) -> int:
    """Return how many shards an axis still splits into; 1 if the mesh lacks the axis or it is manual."""
    return 1 if axis in mesh.manual_axes else mesh.shape.get(axis, 1)


def whole_size(mesh: AnyMesh, axis: str) -> int:
    """Return the size of an axis, also where it is manual; 1 if the mesh lacks it."""
    return mesh.shape.get(axis, 1)


def ring_size(mesh: AnyMesh) -> int:
    """Return how many devices share a sequence, also where `context` is manual; 1 without the axis."""
    return whole_size(mesh, "context")


def sequence_length(length: int, mesh: AnyMesh) -> int:
    """Return the positions of a whole sequence; an array here has `length`, fewer if `context` is manual."""
    return length * ring_size(mesh) // axis_size(mesh, "context")


def num_shards(mesh: AnyMesh) -> int:
    """Return the product of `axis_size` over all axes."""
    return math.prod(axis_size(mesh, axis) for axis in mesh.axis_names)


def mesh_here(mesh: Mesh) -> AnyMesh:
    """Return `mesh`, or inside a `shard_map` over some of its axes the mesh that marks them as manual."""
    here = jax.sharding.get_abstract_mesh()
    return here if here.manual_axes else mesh


def mean_over_manual(x: Array, mesh: AnyMesh) -> Array:
    """Return the mean of `x` over the tokens' manual axes, along which the code already sees one shard."""
    splitting = (*ACTIVATION_RULES["batch"], *ACTIVATION_RULES["sequence"])
    axes = tuple(axis for axis in splitting if axis in mesh.manual_axes)
    return jax.lax.pmean(x, axes) if axes else x


def rows_here(num_rows: int, mesh: AnyMesh) -> Array:
    """Return the numbers, within the whole batch, of the `num_rows` rows that this code sees."""
    rows = jnp.arange(num_rows)
    for axis in ACTIVATION_RULES["batch"][::-1]:
        if axis in mesh.manual_axes:
            rows, num_rows = rows + jax.lax.axis_index(axis) * num_rows, num_rows * mesh.shape[axis]
    return rows


def on_each_device(local: Callable[..., Any], mesh: AnyMesh, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Return a function that runs `local` on each device's shards.

    It is `jax.shard_map` over all axes that are not manual yet; `local` itself if nothing is left to split.
    Where some are manual, the others become so even with one device: XLA partitions no Pallas kernel.

    Args:
        local: the function of one device's shards.
        mesh: the mesh, with its manual axes.
        inputs: PartitionSpecs of the arguments.
        outputs: PartitionSpecs of the results.
    """
    left = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    if not left or (num_shards(mesh) == 1 and not mesh.manual_axes):
        return local
    return jax.shard_map(
        local, mesh=mesh, in_specs=inputs, out_specs=outputs, axis_names=left, check_vma=False
    )


def _spec(dims: Sequence[str], mesh: AnyMesh, rules: Rules) -> PartitionSpec:
    """Return the PartitionSpec by these rules; an axis splits one dim, that of experts before all others."""
    of_experts = {axis for dim in dims if dim in EXPERTS for axis in rules[dim]}
    parts: list[str | tuple[str, ...] | None] = []
    for dim in dims:
        taken = () if dim in EXPERTS else of_experts
        axes = tuple(axis for axis in rules[dim] if axis_size(mesh, axis) > 1 and axis not in taken)
        parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*parts)


def parameter_spec(
    dims: Sequence[str],
    mesh: AnyMesh,
    zero1: bool = False,
    shape: Sequence[int] | None = None,
    *,
    in_step: bool = False,
) -> PartitionSpec:
    """Return the PartitionSpec of a parameter with these dimension names.

    Args:
        zero1: whether the run divides the state of replicas.
        shape: of a parameter at rest. Key-value heads are whole where `tensor` has more devices. Of a table
            with a vocabulary that `stage` and `tensor` do not divide, `tensor` splits the columns.
        in_step: while a step computes, when the replicas have gathered what ZeRO-1 divides.
    """
    rules = _rules_of(mesh, zero1, in_step)
    if shape is not None and num_repeats(dims, shape, mesh) > 1:
        rules = {**rules, KV_HEADS: ()}
    if shape and dims[0] in TABLE_ROWS:
        ways = math.prod(axis_size(mesh, axis) for axis in rules[dims[0]])
        if shape[0] % ways:
            rules = {**rules, dims[0]: (), "embed": (*rules["embed"], "tensor")}
    return _spec(dims, mesh, rules)


def replica_axes(mesh: AnyMesh, zero1: bool = False) -> tuple[str, ...]:
    """Return the axes of more than one device along which a step uses the same parameters, outermost first.

    Experts differ along `expert`, which is such an axis for all others under ZeRO-1. Shards in the mesh's
    order take one reduce-scatter over all of them; XLA makes none for another order.
    """
    chosen = ZERO1_AXES if zero1 else REPLICA_AXES
    return tuple(axis for axis in mesh.axis_names if axis in chosen and axis_size(mesh, axis) > 1)


def width_axes(mesh: AnyMesh, zero1: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes that split a parameter's width within a step, and those by which ZeRO-1 splits it then.

    They are of more than one device, and not of experts. A gradient is scattered over the first, then over
    the others.
    """
    replicas = replica_axes(mesh, zero1) if zero1 else ()
    chosen = (axis for axis in mesh.axis_names if axis in PARAMETER_RULES["embed"] and axis not in replicas)
    return tuple(axis for axis in chosen if axis_size(mesh, axis) > 1), replicas


def _rules_of(mesh: AnyMesh, zero1: bool, in_step: bool) -> Rules:
    """Return `PARAMETER_RULES` with the axes of the width that this mesh and ZeRO-1 have."""
    within, more = width_axes(mesh, zero1)
    return {**PARAMETER_RULES, **dict.fromkeys(("embed", "latent"), within if in_step else within + more)}


def num_repeats(dims: Sequence[str], shape: Sequence[int], mesh: AnyMesh) -> int:
    """Return how many devices along `tensor` use each key-value head of a parameter; 1 if it has none."""
    if KV_HEADS not in dims:
        return 1
    return max(1, axis_size(mesh, "tensor") // shape[dims.index(KV_HEADS)])


def activation_spec(dims: Sequence[str], mesh: AnyMesh) -> PartitionSpec:
    """Return the PartitionSpec of an activation with these dimension names."""
    return _spec(dims, mesh, ACTIVATION_RULES)


def num_chunks_of(array: Any) -> int:
    """Return the size of an array's first dim if it counts a pipeline's chunks of layers; 1 if there is none.

    Only then the second dim, of a chunk's layers, is sharded over `stage`. Outside of a step such an array is
    one of all layers: both dims in one.

    Args:
        array: an array, or a `jax.ShapeDtypeStruct` with a sharding.
    """
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else ()
    return array.shape[0] if len(spec) > 1 and spec[1] == "stage" else 1


def shape_of_layers(array: Any, num_layers: int | None, name: str) -> tuple[int, ...]:
    """Return the shape of an array outside of a step.

    Chunks of layers are in one dim of all layers, and layers that pad a pipeline's stages are left out.

    Args:
        array: an array, or a `jax.ShapeDtypeStruct` with a sharding.
        num_layers: of the model; None if it has no stacked layers.
        name: the last name on the array's path in the state: for a moment, that of its parameter.
    """
    shape = tuple(array.shape)
    if name in TABLES:  # stages split their first dim too
        return shape
    if num_chunks_of(array) > 1:
        shape = (shape[0] * shape[1], *shape[2:])
    elif not (isinstance(array.sharding, NamedSharding) and array.sharding.spec[:1] == ("stage",)):
        return shape
    return shape if num_layers is None else (min(shape[0], num_layers), *shape[1:])


def pin(x: Array, mesh: AnyMesh, *dims: str) -> Array:
    """Constrain `x` to the sharding that its dimension names imply; on one device, return `x` itself."""
    if num_shards(mesh) == 1:
        return x
    assert len(dims) == x.ndim, f"{x.shape} has {x.ndim} dimensions, names given: {dims}"
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(dims, mesh)))


def gather(
    x: Array,
    mesh: AnyMesh,
    dtype: jax.typing.DTypeLike,
    *dims: str,
    zero1: bool = False,
    wide_gradient: bool = False,
    narrowed: Callable[[Array], tuple[Array, Array]] | None = None,
) -> Any:
    """Return a parameter ready for use: cast to `dtype`, and gathered over `fsdp` and `expert`.

    The gradient takes the reverse path: it is reduce-scattered over them in its own format, then cast to
    the parameter's. (A plain sharding constraint would pin the gradient to the gathered layout, which
    needs an all-reduce of twice the bytes.) Under ZeRO-1 `x` is whole along `data`, `context` and `expert`,
    and its gradient is reduce-scattered over these too.

    Key-value heads fewer than the devices along `tensor` are repeated to as many, one for each device.

    With `wide_gradient` the parameter crosses the network in `dtype`, but the result is float32, so that its
    gradient is summed over all tokens in float32. A product rounds it to `dtype` again, which costs nothing:
    XLA merges the two casts.

    `narrowed` makes smaller values and their scale of the cast shards, and only the values cross the network.
    The result is then the values, the scale, and zeros in the parameter's shape, whose gradient is the
    parameter's: the small format could not hold it.
    """
    of_gradient = jnp.float32 if wide_gradient else dtype
    if num_shards(mesh) == 1 and narrowed is None:
        return x.astype(of_gradient)
    x = _repeated(x, mesh, dims, zero1)
    at_rest = NamedSharding(mesh, parameter_spec(dims, mesh, zero1, in_step=True))
    left = NamedSharding(mesh, parameter_spec(dims, mesh, zero1))
    in_use = NamedSharding(mesh, _spec(dims, mesh, {**PARAMETER_RULES, "embed": (), "latent": ()}))
    stored = x.dtype

    @jax.custom_vjp
    def use(x: Array) -> Any:
        cast = jax.lax.with_sharding_constraint(x.astype(dtype), at_rest)
        if narrowed is None:
            return jax.lax.with_sharding_constraint(cast, in_use).astype(of_gradient)
        values, scale = narrowed(cast)
        values = jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(values, at_rest), in_use)
        return values, scale, jnp.zeros(x.shape, of_gradient)

    def backward(_: None, gradient: Any) -> tuple[Array]:
        if narrowed is not None:
            gradient = gradient[2]
        if dims[0] not in TABLE_ROWS:  # reduce over `fsdp` first, inside a host; a table's is split
            gradient = jax.lax.with_sharding_constraint(gradient, at_rest)
        return (jax.lax.with_sharding_constraint(gradient, left).astype(stored),)

    use.defvjp(lambda x: (use(x), None), backward)
    return use(x)


def _repeated(x: Array, mesh: AnyMesh, dims: tuple[str, ...], zero1: bool) -> Array:
    """Return a stored parameter with a key-value head for each device along `tensor`, sharded as others are.

    A device takes its head from the whole that it holds. Gradients of the same head are summed.
    """
    repeats = num_repeats(dims, x.shape, mesh)
    if repeats == 1:
        return x
    place = dims.index(KV_HEADS)
    each = NamedSharding(mesh, parameter_spec(dims, mesh, zero1, in_step=True))
    whole = NamedSharding(mesh, parameter_spec(dims, mesh, zero1, x.shape))

    @jax.custom_vjp
    def repeat(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(jnp.repeat(x, repeats, axis=place), each)

    def backward(_: None, gradient: Array) -> tuple[Array]:
        grouped = gradient.reshape(*gradient.shape[:place], -1, repeats, *gradient.shape[place + 1 :])
        return (jax.lax.with_sharding_constraint(grouped.sum(axis=place + 1), whole),)

    repeat.defvjp(lambda x: (repeat(x), None), backward)
    return repeat(x)


def _split_by(mesh: AnyMesh, dim: str) -> tuple[str, ...]:
    return tuple(axis for axis in ACTIVATION_RULES[dim] if axis_size(mesh, axis) > 1)


def batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes of more than one device that split the batch."""
    return _split_by(mesh, "batch")


def token_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes of more than one device that split tokens inside a block: by row and by position."""
    return _split_by(mesh, "batch") + _split_by(mesh, "sequence")


def look_up(
    table: Array,
    indices: Array,
    mesh: AnyMesh,
    zero1: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    rows: str = "vocab",
    sums: Array | None = None,
    *,
    in_loop: bool = False,
) -> Array:
    """Return the rows of `table` [rows, embed] (with all columns) at `indices` [batch, sequence].

    The rows are cast to `dtype`, if given; their gradient is summed over devices in the format of `table`.

    Over `tensor`, each device looks up the rows that it holds, and the sum is scattered by position, as
    residuals are laid out. Without this, the partitioner gathers the whole table. Each device sums the
    gradient in float32 and only then casts it: a frequent token has thousands of terms in a batch, and a sum
    in sixteen bits would lose them to rounding.

    In code of one stage, a table of the rows `token` has that stage's part of them. Every stage then receives
    the found rows, and the gradients that the stages give are added.

    With `sums`, the sum of earlier gradients of the table, the gradient of `sums` is that sum with this one
    added, and `table` has none: so float32 rows are added in place. `in_loop`: a step runs this more than
    once.
    """
    whole, split = PartitionSpec(_one(mesh, "tensor")), activation_spec(("batch", "sequence"), mesh)
    residual = activation_spec(("batch", "residual_sequence", "embed"), mesh)
    columns, axes = parameter_spec((rows, "embed"), mesh, zero1), _row_axes(mesh, rows)

    @jax.custom_vjp
    def find(table: Array, indices: Array, sums: Array | None) -> Array:
        table = table if dtype is None else table.astype(dtype)
        if not axes:
            return table[indices]
        return on_each_device(partial(_found, axes), mesh, (whole, split), residual)(table, indices)

    def backward(saved: tuple[Array, Array, Array | None], gradient: Array) -> Any:
        table, indices, sums = saved
        num_rows = table.shape[0] // axis_size(mesh, "tensor")
        local = partial(_table_gradient, mesh, axes, zero1, in_loop, num_rows, table.dtype)
        if sums is None:
            return on_each_device(local, mesh, (split, residual), columns)(indices, gradient), None, None
        each = on_each_device(local, mesh, (split, residual, columns), columns)
        return None, None, each(indices, gradient, sums)

    find.defvjp(lambda *arguments: (find(*arguments), arguments), backward)
    return find(table, indices, sums)


def _one(mesh: AnyMesh, axis: str) -> str | None:
    return axis if axis_size(mesh, axis) > 1 else None


def _row_axes(mesh: AnyMesh, rows: str) -> tuple[str, ...]:
    """Return the axes that split a table's rows, outermost first; of these `stage` is manual."""
    is_shared = rows == "token" and "stage" in mesh.manual_axes
    return (*(("stage",) if is_shared else ()), *(("tensor",) if _one(mesh, "tensor") else ()))


def _place(axes: tuple[str, ...], indices: Array, num_rows: int) -> Array:
    """Return the positions of `indices` among this device's rows; `num_rows` for rows of other devices."""
    first = jax.lax.axis_index(axes) * num_rows if axes else 0
    place = indices - first
    return jnp.where((place >= 0) & (place < num_rows), place, num_rows)


def _found(axes: tuple[str, ...], rows: Array, indices: Array) -> Array:
    found = rows.at[_place(axes, indices, rows.shape[0])].get(mode="fill", fill_value=0)
    if "tensor" in axes:
        found = jax.lax.psum_scatter(found, "tensor", scatter_dimension=1, tiled=True)
    return jax.lax.psum(found, "stage") if "stage" in axes else found


def _table_gradient(
    mesh: AnyMesh,
    axes: tuple[str, ...],
    zero1: bool,
    in_loop: bool,
    num_rows: int,
    dtype: jax.typing.DTypeLike,
    indices: Array,
    gradient: Array,
    sums: Array | None = None,
) -> Array:
    """Return the gradient of this device's rows and columns of the table; added to `sums`.

    The device receives its columns of every token's gradient.
    """
    if "stage" in axes:
        gradient = jax.lax.psum(gradient, "stage")
    if "tensor" in axes:
        gradient = jax.lax.all_gather(gradient, "tensor", axis=1, tiled=True)
    columns, replicas = width_axes(mesh, zero1)
    if columns:
        gradient = jax.lax.all_to_all(gradient, columns, split_axis=2, concat_axis=0, tiled=True)
        indices = jax.lax.all_gather(indices, columns, axis=0, tiled=True)
    place = _place(axes, indices, num_rows)
    others = tuple(axis for axis in token_axes(mesh) if axis not in columns)
    if sums is not None and sums.dtype == jnp.float32 and not others:
        return sums.at[place].add(gradient.astype(jnp.float32), mode="drop")
    total = zeros_here((num_rows, gradient.shape[2]), gradient[0, 0, 0] if in_loop else None)
    total = total.at[place].add(gradient.astype(jnp.float32), mode="drop").astype(dtype)
    if replicas:
        total = jax.lax.psum_scatter(total, replicas, scatter_dimension=1, tiled=True)
        others = tuple(axis for axis in others if axis not in replicas)
    total = jax.lax.psum(total, others) if others else total
    return total if sums is None else sums + total.astype(sums.dtype)


def zeros_here(shape: tuple[int, ...], of_now: Array | None) -> Array:
    """Return zeros in float32 that are made where they are used.

    XLA takes plain zeros out of a loop, keeps them through it, and copies them in every round.

    Args:
        of_now: a number that the code around has just computed; None outside of a loop.
    """
    if of_now is None:
        return jnp.zeros(shape, jnp.float32)
    return jnp.broadcast_to((of_now > jnp.inf).astype(jnp.float32), shape)  # nothing is, and XLA cannot know


def mesh_of(axes: Sequence[tuple[str, int]], devices: Sequence[Any]) -> Mesh:
    """Return the mesh of `axes` (name, size; outermost first) over `devices` in their order.

    Axes are automatic: the compiler chooses the sharding of everything that no rule pins. The product of the
    sizes must be the number of devices. `Layout.resolve` reports a mismatch to the user beforehand.
    """
    names = tuple(name for name, _ in axes)
    sizes = tuple(size for _, size in axes)
    assert int(np.prod(sizes)) == len(devices), f"axes {dict(axes)} do not cover {len(devices)} devices"
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return the axes of one entry of a PartitionSpec, which is None, one name or several names.

    >>> axes_of(None), axes_of("data"), axes_of(("data", "fsdp"))
    ((), ('data',), ('data', 'fsdp'))
    """
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple | list) else ()
