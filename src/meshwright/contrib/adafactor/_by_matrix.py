"""Let an update see each layer's matrices alone, as Adafactor's does.

Layers are stacked along their own dim, and a matrix's inputs or outputs may span several dims (attention:
embed, and heads x head_dim).
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from meshwright.trainer.models import Parameter, Tree, is_parameter
from meshwright.trainer.step import MatrixDims, matrix_dims


def by_matrix(update: optax.GradientTransformation, declared: Tree) -> optax.GradientTransformation:
    """Wrap `update` to see each layer's matrices and vectors as separate arrays of two dims or one.

    Its state has a part for each number of stacked dims. "single": none. "stacked": one leading dim, for the
    layers or for one layer's experts. "experts": two leading dims, for the layers and their experts. A
    pipeline's chunks are one dim more, which no name counts: the state's parts are those of any layout.
    """
    dims = jax.tree.map(matrix_dims, declared, is_leaf=is_parameter)
    num_chunk_dims = max((int("chunks" in p.dims) for p in _declarations(declared)), default=0)
    num_stacked = {"stacked": 1 + num_chunk_dims, "single": 0, "experts": 2 + num_chunk_dims}
    parts = {name: _stacked(update, count) for name, count in num_stacked.items()}

    def flat(tree: Tree) -> dict[str, Tree]:
        def part(name: str) -> Tree:
            def leaf(dims: MatrixDims, x: Any) -> Any:
                is_in = len(dims.stack) == num_stacked[name]
                return x.reshape(dims.flat_shape(x.shape)) if is_in else optax.MaskedNode()

            return jax.tree.map(leaf, dims, tree, is_leaf=lambda d: isinstance(d, MatrixDims))

        return {name: of_part for name in parts if jax.tree.leaves(of_part := part(name))}

    def init(params: Tree) -> Tree:
        return {name: parts[name].init(tree) for name, tree in flat(params).items()}

    def apply(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        gradients, values = flat(updates), flat(params)
        new = {name: parts[name].update(gradients[name], state[name], values[name]) for name in state}

        def whole(x: Any, *changes: Any) -> Any:
            return next(y for y in changes if not isinstance(y, optax.MaskedNode)).reshape(x.shape)

        changed = jax.tree.map(whole, updates, *(changes for changes, _ in new.values()))
        return changed, {name: moments for name, (_, moments) in new.items()}

    return optax.GradientTransformation(init, apply)


def _declarations(declared: Tree) -> list[Parameter]:
    return jax.tree.leaves(declared, is_leaf=is_parameter)


def _stacked(update: optax.GradientTransformation, num_dims: int) -> optax.GradientTransformation:
    """Wrap `update` to see each part of arrays with `num_dims` leading dims more."""
    for _ in range(num_dims):
        update = optax.GradientTransformation(jax.vmap(update.init), jax.vmap(update.update))
    return update
