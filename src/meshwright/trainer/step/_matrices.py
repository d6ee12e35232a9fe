"""Find the matrices of single layers in the arrays of parameters.

Layers are stacked along their own dim, and a matrix's inputs or outputs may span several dims (attention:
embed, and heads x head_dim).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.sharding import EXPERTS, TABLE_ROWS
from meshwright.trainer.models import Parameter

STACKED = ("chunks", "layers", "first_layers", *EXPERTS)  # dims that stack several parameters of one kind
OUTER = (*TABLE_ROWS, "positions", "one")  # dims of tables and heads, which are no hidden matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixDims:
    """The indices of a parameter's dims: those that stack matrices, then those of a matrix's two sides.

    A vector has one side, and `second` is empty. `inputs_first`: a product sums over `first`, not `second`.
    """

    stack: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...] = ()
    inputs_first: bool = True

    @property
    def sides(self) -> tuple[tuple[int, ...], ...]:
        """Groups of dims, each one dim of the flattened parameter: the stack's, then one or two sides."""
        return (*((place,) for place in self.stack), *(side for side in (self.first, self.second) if side))

    def flat_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `shape` with the dims of each side merged into one."""
        return tuple(math.prod(shape[place] for place in side) for side in self.sides)

    @property
    def input_output_dims(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dims of a matrix's inputs and those of its outputs."""
        return (self.first, self.second) if self.inputs_first else (self.second, self.first)

    def inputs_outputs(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of each matrix in a parameter of `shape`."""
        inputs, outputs = (math.prod(shape[dim] for dim in side) for side in self.input_output_dims)
        return inputs, outputs


def is_matrix(parameter: Parameter) -> bool:
    """Return whether a parameter is a matrix or a table, not a norm or a bias.

    The test is its random initialisation, since a bias may also have two dims (heads and head_dim). An
    adapter's second matrix begins as zeros; a latent's norm, which has the same dim, as ones.
    """
    return parameter.initial == "fan_in" or (parameter.initial == "zeros" and "rank" in parameter.dims)


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Return whether a parameter is a matrix inside the model, not a table or a head."""
    return is_matrix(parameter) and not set(OUTER) & set(parameter.dims)


def matrix_dims(parameter: Parameter) -> MatrixDims:
    """Return the dims of a parameter's matrices, or of its vectors.

    A matrix's inputs are the leading or trailing dims (after the stack) whose sizes multiply to `fan_in`.
    """
    shape, places = parameter.shape, tuple(range(len(parameter.shape)))
    num_stacked = sum(dim in STACKED for dim in parameter.dims)
    assert set(parameter.dims[:num_stacked]) <= set(STACKED), f"{parameter.dims}: the stack is not first"
    stack, rest = places[:num_stacked], places[num_stacked:]
    if is_matrix(parameter):
        for inputs_first in (True, False):
            for cut in range(1, len(rest)):
                first, second = rest[:cut], rest[cut:]
                inputs = first if inputs_first else second
                if math.prod(shape[place] for place in inputs) == parameter.fan_in:
                    return MatrixDims(stack=stack, first=first, second=second, inputs_first=inputs_first)
        raise AssertionError(f"no dims of {parameter} have its fan_in")
    return MatrixDims(stack=stack, first=rest)


def merged_entry(side: tuple[int, ...], spec: PartitionSpec) -> Any:
    """Return the axes that shard several merged dims, or None if a dim other than the first is sharded.

    Only the first dim's shards are contiguous in the merged dim.
    """
    axes, *others = (spec[dim] for dim in side)
    return axes if all(other is None for other in others) else None
