"""Where the optimizer's moments lie: with their parameter, or with the part of its dims that they keep."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..models import Parameter
from ..sharding import parameter_spec
from ._matrices import MatrixDims, is_parameter, matrix_dims

Tree = Any
Shape = tuple[int, ...]


def moment_shardings(state: Tree, declared: Tree, mesh: Mesh, zero1: bool = False) -> Tree:
    """The shardings of an optimizer's state of these shapes.

    An array below a parameter's own path is that parameter's moment. One of the parameter's shape lies
    where it lies; one of its matrices' rows or columns is split as those are. What belongs to no parameter
    (counts of steps) or keeps none of its dims is on every device.
    """
    parameters = {
        jax.tree_util.keystr(path): parameter
        for path, parameter in jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_parameter)
    }

    def sharding(path: tuple[Any, ...], moment: jax.ShapeDtypeStruct) -> NamedSharding:
        tails = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        found = next((tail for tail in tails if tail in parameters), None)
        if found is None:
            return NamedSharding(mesh, PartitionSpec())
        name = jax.tree_util.keystr(path).removesuffix(found).rpartition(".")[2]
        return NamedSharding(mesh, _spec(name, moment.shape, parameters[found], mesh, zero1))

    return jax.tree_util.tree_map_with_path(sharding, state)


def _spec(name: str, shape: Shape, parameter: Parameter, mesh: Mesh, zero1: bool) -> PartitionSpec:
    """How one moment lies."""
    whole = parameter_spec(parameter.dims, mesh, zero1)
    if shape == parameter.shape:
        return whole
    dims = matrix_dims(parameter)
    sides = _sides_kept(name, dims, parameter.shape)
    flat = tuple(
        size for side in sides for size in MatrixDims(stack=(), first=side).flat_shape(parameter.shape)
    )
    return PartitionSpec(*(_of_side(side, whole) for side in sides)) if flat == shape else PartitionSpec()


def _sides_kept(name: str, dims: MatrixDims, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """The groups of dims that a moment has: of a matrix's longer and shorter sides, Optax's Adafactor keeps
    the shorter one in `v_row` and the longer one in `v_col`; the second is longer where they are equal."""
    if name not in ("v_row", "v_col") or not dims.second:
        return dims.sides
    first, second = dims.inputs_outputs(shape) if dims.inputs_first else dims.inputs_outputs(shape)[::-1]
    longer, shorter = (dims.first, dims.second) if first > second else (dims.second, dims.first)
    return (*((place,) for place in dims.stack), shorter if name == "v_row" else longer)


def _of_side(side: tuple[int, ...], whole: PartitionSpec) -> Any:
    """The axes that split several dims made one: those of the first, for it alone lies in one piece."""
    axes, *others = (whole[place] for place in side)
    return axes if all(other is None for other in others) else None
