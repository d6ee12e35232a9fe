"""Pad the rows of embedding and head for a step, where their number does not suit the devices.

GPT-2's 50,257 rows divide over no axis. Between steps such a table has its own rows, and `tensor` splits its
columns beside the axes that split them anyway; stages hold all of it. A step begins with an exchange over
`tensor`, after which each device holds a part of the rows, padded with zeros to a multiple of `UNIT`. Of an
embedding each stage keeps its own part. At the step's end the gradient goes the opposite way, and its padding
is dropped. On GPUs with neither axis, large tables are padded as well: their products are then aligned, and
XLA copies none of their operands to pad them itself.

So the padding has no parameter, moment or byte in a checkpoint, and a run goes on with any other layout. The
loss leaves the logits of the padding out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from meshwright.sharding import TABLE_ROWS, AnyMesh, axes_of, axis_size, on_each_device, parameter_spec
from meshwright.trainer.models import Parameter, is_parameter

from ._gradients import without_axes

Tree = Any
UNIT = 128  # rows; as nanoGPT and Megatron-LM
MOST_FOR_ALIGNMENT = 0.01  # of a table's rows; smaller tables would lose more by padding than they gain


class PaddedTables:
    """The tables of a model that a step pads on a mesh.

    Args:
        declared: all of the model's parameters.
        mesh: the run's.
        zero1: whether tables are split over `data` and `context` too.
    """

    def __init__(self, declared: Tree, mesh: Mesh, zero1: bool) -> None:
        self._mesh, self._zero1 = mesh, zero1
        self._stages, self._tensor = axis_size(mesh, "stage"), axis_size(mesh, "tensor")
        self._tables: Mapping[str, Parameter] = {
            name: p
            for name, p in declared.items()
            if is_parameter(p) and _is_table(p) and self._is_padded(p.shape[0])
        }

    def declared(self, declared: Tree) -> Tree:
        """Return declarations with the padded shapes."""

        def padded(table: Parameter, at_rest: Parameter) -> Parameter:
            return replace(table, shape=(self._rows_in_use(at_rest), *table.shape[1:]))

        return self._each(declared, padded)

    def shardings(self, shardings: Tree) -> Tree:
        """Return the shardings of gradients, with padded tables sharded as the step uses them."""

        def in_use(_: NamedSharding, table: Parameter) -> NamedSharding:
            return NamedSharding(self._mesh, spec_in_step(table, self._mesh, self._zero1))

        return self._each(shardings, in_use)

    def widened(self, parameters: Tree) -> Tree:
        """Return parameters with padded tables, whose rows are split as a step uses them."""
        with jax.named_scope("pad_vocabulary"):
            return self._each(parameters, self._by_rows)

    def narrowed(self, gradients: Tree) -> Tree:
        """Drop the padding from gradients of `widened` parameters."""
        with jax.named_scope("unpad_vocabulary"):
            return self._each(gradients, self._by_columns)

    def _is_padded(self, num_rows: int) -> bool:
        if self._stages * self._tensor > 1:
            return num_rows % (self._stages * self._tensor) != 0
        added = -num_rows % UNIT
        return self._mesh.devices.flat[0].platform == "gpu" and 0 < added < MOST_FOR_ALIGNMENT * num_rows

    def _rows_in_use(self, table: Parameter) -> int:
        unit = math.lcm(UNIT, self._stages * self._tensor)
        return -(-table.shape[0] // unit) * unit

    def _each(self, tree: Tree, change: Any) -> Tree:
        changed = {name: change(tree[name], table) for name, table in self._tables.items() if name in tree}
        return {**tree, **changed}

    def _at_rest(self, table: Parameter) -> PartitionSpec:
        return parameter_spec(table.dims, self._mesh, self._zero1, table.shape)

    def _by_rows(self, x: Float[Array, "rows embed"], table: Parameter) -> Float[Array, "padded embed"]:
        in_use = spec_in_step(table, self._mesh, self._zero1)

        def local(part: Array) -> Array:
            part = jnp.pad(part, ((0, self._rows_in_use(table) - table.shape[0]), (0, 0)))
            for axis in axes_of(in_use[0]):  # outermost first
                if axis == "tensor":
                    part = jax.lax.all_to_all(part, axis, split_axis=0, concat_axis=1, tiled=True)
                else:
                    held = part.shape[0] // self._stages
                    part = jax.lax.dynamic_slice_in_dim(part, jax.lax.axis_index(axis) * held, held)
            return part

        return on_each_device(local, self._mesh, (self._at_rest(table),), in_use)(x)

    def _by_columns(self, x: Float[Array, "padded embed"], table: Parameter) -> Float[Array, "rows embed"]:
        in_use = spec_in_step(table, self._mesh, self._zero1)

        def local(part: Array) -> Array:
            for axis in reversed(axes_of(in_use[0])):
                if axis == "tensor":
                    part = jax.lax.all_to_all(part, axis, split_axis=1, concat_axis=0, tiled=True)
                else:
                    part = jax.lax.all_gather(part, axis, axis=0, tiled=True)
            return part[: table.shape[0]]

        return on_each_device(local, self._mesh, (in_use,), self._at_rest(table))(x)


def spec_in_step(declared: Parameter, mesh: AnyMesh, zero1: bool, *, in_step: bool = False) -> PartitionSpec:
    """Return the PartitionSpec of a parameter's gradient, or `in_step` of the parameter as a step uses it.

    All stages share the loss by position, so each needs the whole head.
    """
    if not _is_table(declared):
        return parameter_spec(declared.dims, mesh, zero1, declared.shape, in_step=in_step)
    spec = parameter_spec(declared.dims, mesh, zero1, in_step=in_step)
    return without_axes(spec, ("stage",)) if declared.dims[0] == "vocab" else spec


def _is_table(declared: Parameter) -> bool:
    return bool(declared.dims) and declared.dims[0] in TABLE_ROWS
