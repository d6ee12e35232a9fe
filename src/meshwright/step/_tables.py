"""Pad the rows of embedding and head for a step, where their number does not suit the devices.

GPT-2's 50,257 rows divide over no axis. Between steps such a table has its own rows, and `tensor` splits its
columns beside the axes that split them anyway. A step begins with an exchange over `tensor`, after which each
device holds a part of the rows, padded with zeros to a multiple of `UNIT`. At its end the gradient goes the
opposite way, and its padding is dropped. On GPUs without `tensor`, large tables are padded as well: their
products are then aligned, and XLA copies none of their operands to pad them itself.

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
from jax.sharding import Mesh
from jaxtyping import Array, Float

from ..models import Parameter, is_parameter
from ..sharding import axis_size, on_each_device, parameter_spec

Tree = Any
UNIT = 128  # rows; as nanoGPT and Megatron-LM
MOST_FOR_ALIGNMENT = 0.01  # of a table's rows; smaller tables would lose more by padding than they gain
AXIS = "tensor"


class PaddedTables:
    """The tables of a model that a step pads on a mesh.

    Args:
        declared: all of the model's parameters.
        mesh: the run's.
        zero1: whether tables are split over `data` too.
    """

    def __init__(self, declared: Tree, mesh: Mesh, zero1: bool) -> None:
        self._mesh, self._zero1 = mesh, zero1
        self._num_rows: Mapping[str, int] = {
            name: p.shape[0]
            for name, p in declared.items()
            if is_parameter(p) and "vocab" in p.dims and self._is_padded(p.shape[0])
        }

    def declared(self, declared: Tree) -> Tree:
        """Return declarations with the padded shapes."""

        def padded(table: Parameter, num_rows: int) -> Parameter:
            return replace(table, shape=(self._rows_in_use(num_rows), *table.shape[1:]))

        return self._each(declared, padded)

    def widened(self, parameters: Tree) -> Tree:
        """Return parameters with padded tables, whose rows `tensor` splits."""
        with jax.named_scope("pad_vocabulary"):
            return self._each(parameters, self._by_rows)

    def narrowed(self, gradients: Tree) -> Tree:
        """Return gradients of `widened` parameters as those of the parameters."""
        with jax.named_scope("unpad_vocabulary"):
            return self._each(gradients, self._by_columns)

    def _is_padded(self, num_rows: int) -> bool:
        if axis_size(self._mesh, AXIS) > 1:
            return num_rows % axis_size(self._mesh, AXIS) != 0
        added = self._rows_in_use(num_rows) - num_rows
        return self._mesh.devices.flat[0].platform == "gpu" and 0 < added < MOST_FOR_ALIGNMENT * num_rows

    def _rows_in_use(self, num_rows: int) -> int:
        unit = math.lcm(UNIT, axis_size(self._mesh, AXIS))
        return -(-num_rows // unit) * unit

    def _each(self, tree: Tree, change: Any) -> Tree:
        changed = {name: change(tree[name], n) for name, n in self._num_rows.items() if name in tree}
        return {**tree, **changed}

    def _specs(self, num_rows: int, width: int) -> tuple[Any, Any]:
        """Return the PartitionSpecs of a table between steps and within one."""
        dims = ("vocab", "embed")
        at_rest = parameter_spec(dims, self._mesh, self._zero1, (num_rows, width))
        return at_rest, parameter_spec(dims, self._mesh, self._zero1)

    def _by_rows(self, table: Float[Array, "rows embed"], num_rows: int) -> Float[Array, "padded embed"]:
        at_rest, in_use = self._specs(*table.shape)

        def local(part: Array) -> Array:
            part = jnp.pad(part, ((0, self._rows_in_use(num_rows) - num_rows), (0, 0)))
            if axis_size(self._mesh, AXIS) == 1:
                return part
            return jax.lax.all_to_all(part, AXIS, split_axis=0, concat_axis=1, tiled=True)

        return on_each_device(local, self._mesh, (at_rest,), in_use)(table)

    def _by_columns(self, table: Float[Array, "padded embed"], num_rows: int) -> Float[Array, "rows embed"]:
        at_rest, in_use = self._specs(num_rows, table.shape[1])

        def local(part: Array) -> Array:
            if axis_size(self._mesh, AXIS) > 1:
                part = jax.lax.all_to_all(part, AXIS, split_axis=1, concat_axis=0, tiled=True)
            return part[:num_rows]

        return on_each_device(local, self._mesh, (in_use,), at_rest)(table)
