"""Which numbers of a parameter are a matrix: optimizers that treat matrices treat those of single layers.

Layers are stacked along a dim of their own, and a matrix's inputs or outputs may be several dims
(attention's: embed on one side, heads x head_dim on the other).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import optax

from ..models import Parameter

Tree = Any
STACKED = ("layers", "experts")  # dims that hold several parameters of one kind
OUTER = ("vocab", "positions", "one")  # tables and heads: no hidden matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixDims:
    """The dims of a parameter, by place: those that stack matrices, then those of a matrix's two sides.

    A vector has one side and `second` is empty. `inputs_first`: whether a product sums over `first`.
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
        """`shape` with the dims of each side as one."""
        return tuple(math.prod(shape[place] for place in side) for side in self.sides)

    def inputs_outputs(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many inputs and outputs each matrix of a parameter of `shape` has."""
        sides = [math.prod(shape[place] for place in side) for side in (self.first, self.second)]
        return (sides[0], sides[1]) if self.inputs_first else (sides[1], sides[0])


def is_parameter(leaf: object) -> bool:
    """Whether a leaf of a model's table of parameters is reached."""
    return isinstance(leaf, Parameter)


def is_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix or a table, no norm and no bias.

    What is drawn is a matrix: a bias may have two dims too, heads and their width.
    """
    return parameter.initial == "fan_in"


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix inside the model: no table, no head."""
    return is_matrix(parameter) and not set(OUTER) & set(parameter.dims)


def matrix_dims(parameter: Parameter) -> MatrixDims:
    """The dims of a parameter's matrices, or of its vectors.

    The inputs of a matrix are the dims, first or last, that have `fan_in` numbers.
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


def muon_dims(parameter: Parameter) -> optax.contrib.MuonDimensionNumbers:
    """What Optax's Muon must know: over which dims a product sums, and which it makes."""
    dims = matrix_dims(parameter)
    inputs, outputs = (dims.first, dims.second) if dims.inputs_first else (dims.second, dims.first)
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


def by_matrix(update: optax.GradientTransformation, declared: Tree) -> optax.GradientTransformation:
    """`update`, given each layer's matrices and vectors as arrays of their own, of two dims or one.

    Its state has a part for each number of stacked dims: "single"; "stacked", whose arrays have a leading dim
    for the layers (or a layer's experts); and "experts", with two, for layers and the experts of each.
    """
    dims = jax.tree.map(matrix_dims, declared, is_leaf=is_parameter)
    stacked = optax.GradientTransformation(jax.vmap(update.init), jax.vmap(update.update))
    twice = optax.GradientTransformation(jax.vmap(stacked.init), jax.vmap(stacked.update))
    parts = {"stacked": stacked, "single": update, "experts": twice}
    kinds = ("single", "stacked", "experts")

    def flat(tree: Tree) -> dict[str, Tree]:
        def part(name: str) -> Tree:
            def leaf(dims: MatrixDims, x: Any) -> Any:
                mine = kinds[len(dims.stack)] == name
                return x.reshape(dims.flat_shape(x.shape)) if mine else optax.MaskedNode()

            return jax.tree.map(leaf, dims, tree, is_leaf=lambda d: isinstance(d, MatrixDims))

        found = {name: part(name) for name in parts}
        return {name: tree for name, tree in found.items() if jax.tree.leaves(tree)}

    def init(params: Tree) -> Tree:
        return {name: parts[name].init(tree) for name, tree in flat(params).items()}

    def apply(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        gradients, values = flat(updates), flat(params)
        done = {name: parts[name].update(gradients[name], state[name], values[name]) for name in state}
        changes = [change for change, _ in done.values()]

        def whole(x: Any, *found: Any) -> Any:
            return next(y for y in found if not isinstance(y, optax.MaskedNode)).reshape(x.shape)

        return jax.tree.map(whole, updates, *changes), {name: new for name, (_, new) in done.items()}

    return optax.GradientTransformation(init, apply)
