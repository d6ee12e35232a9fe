"""Build the optimizer of a run and the schedule of its learning rate, and shard the optimizer's moments.

Optimizers that act on matrices act on those of single layers. Layers are stacked along their own dim, and a
matrix's inputs or outputs may span several dims (attention: embed, and heads x head_dim). Moments have the
sharding of their parameter, or of those of its dims that they keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright import config as sections
from meshwright.sharding import TABLE_ROWS, axis_size, parameter_spec
from meshwright.trainer.models import Parameter, is_parameter

Tree = Any
STACKED = ("chunks", "layers", "experts")  # dims that stack several parameters of one kind
OUTER = (*TABLE_ROWS, "positions", "one")  # dims of tables and heads, which are no hidden matrices


def schedule_of(config: sections.RunConfig) -> optax.Schedule:
    """Return the learning rate by step, counted from 0: a linear warmup, then the schedule's own curve."""
    peak, schedule, steps = config.peak_learning_rate, config.schedule, config.horizon_steps
    warmup = schedule.warmup_steps
    left = max(steps - warmup, 1)
    after: optax.Schedule
    match schedule:
        case sections.ConstantSchedule():
            after = optax.constant_schedule(peak)
        case sections.CosineSchedule():
            after = optax.cosine_decay_schedule(peak, left, alpha=schedule.final_fraction)
        case sections.LinearSchedule():
            after = optax.linear_schedule(peak, peak * schedule.final_fraction, left)
        case sections.StableSchedule():
            stable, end = steps - warmup - schedule.decay_steps, peak * schedule.final_fraction
            after = optax.linear_schedule(peak, end, schedule.decay_steps, transition_begin=stable)
        case sections.InverseRootSchedule():  # Vaswani et al. 2017: peak x sqrt(warmup / step)
            after = lambda step: peak * jnp.sqrt(warmup / (jnp.maximum(step, 0) + warmup))  # noqa: E731

    rise = optax.linear_schedule(0.0, peak, warmup)
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def optimizer_of(config: sections.RunConfig, declared: Tree) -> optax.GradientTransformation:
    """Return the optimizer of `config` for a learning rate of 1; the step multiplies by the actual rate.

    `declared` is the model's tree of parameter declarations. By default weight decay applies to matrices and
    tables, not to norms and biases; `weight_decay_on` may extend it to all parameters.
    """
    chosen = config.optimizer
    update = chosen.update(_Declared(declared, decays_all=chosen.weight_decay_on == "all"))
    clip = chosen.clip_norm
    return update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)


class _Declared:
    """Say what an optimizer asks of the parameters (`config.Parameters`), from their declarations."""

    def __init__(self, declared: Tree, *, decays_all: bool) -> None:
        self._declared = declared
        self.decayed = jax.tree.map(lambda p: decays_all or is_matrix(p), declared, is_leaf=is_parameter)

    def split(self, hidden: Callable[[Parameter], Any], other: Any) -> Tree:
        pick = lambda p: hidden(p) if is_hidden_matrix(p) else other  # noqa: E731
        return jax.tree.map(pick, self._declared, is_leaf=is_parameter)

    def dims(self, parameter: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return matrix_dims(parameter).input_output_dims

    def sizes(self, parameter: Parameter) -> tuple[int, int]:
        return matrix_dims(parameter).inputs_outputs(parameter.shape)

    def by_matrix(self, update: optax.GradientTransformation) -> optax.GradientTransformation:
        return by_matrix(update, self._declared)


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
    adapter's second matrix begins as zeros.
    """
    return parameter.initial == "fan_in" or "rank" in parameter.dims


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


def moment_shardings(state: Tree, declared: Tree, mesh: Mesh, zero1: bool = False) -> Tree:
    """Return the shardings of an optimizer's state, given the state's shapes.

    An array whose path ends with a parameter's path is that parameter's moment. A moment of the parameter's
    shape has its sharding. A moment of its matrices' rows or columns is sharded as these are. Arrays that
    belong to no parameter (step counts) or keep none of its dims are replicated. Of layers that stages share,
    every array with a number for each layer is sharded over `stage`, as a checkpoint expects.
    """
    parameters = {
        jax.tree_util.keystr(path): parameter
        for path, parameter in jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_parameter)
    }

    stacks = (
        (p.shape[: p.dims.index("layers") + 1], p.dims[: p.dims.index("layers") + 1])
        for p in parameters.values()
        if "layers" in p.dims
    )
    layers = {shape: parameter_spec(dims, mesh) for shape, dims in stacks if axis_size(mesh, "stage") > 1}

    def sharding(path: tuple[Any, ...], moment: jax.ShapeDtypeStruct) -> NamedSharding:
        tails = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        owner = next((tail for tail in tails if tail in parameters), None)
        if owner is None:
            spec = next((spec for shape, spec in layers.items() if moment.shape[: len(shape)] == shape), ())
            return NamedSharding(mesh, PartitionSpec(*spec))
        name = jax.tree_util.keystr(path).removesuffix(owner).rpartition(".")[2]
        parameter = parameters[owner]
        spec = parameter_spec(parameter.dims, mesh, zero1, parameter.shape)
        if moment.shape != parameter.shape:
            spec = _spec_of_sides(name, moment.shape, parameter, spec)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, state)


def _spec_of_sides(
    name: str, shape: tuple[int, ...], parameter: Parameter, spec: PartitionSpec
) -> PartitionSpec:
    """Return the PartitionSpec of a moment over a matrix's rows or columns, given the parameter's `spec`.

    Of a matrix's sides, Optax's Adafactor keeps the shorter in `v_row` and the longer in `v_col`. If they are
    equal, the second side counts as the longer.
    """
    dims = matrix_dims(parameter)
    kept = dims.sides
    if name in ("v_row", "v_col") and dims.second:
        first, second = (
            math.prod(parameter.shape[dim] for dim in side) for side in (dims.first, dims.second)
        )
        longer, shorter = (dims.first, dims.second) if first > second else (dims.second, dims.first)
        kept = (*kept[: len(dims.stack)], shorter if name == "v_row" else longer)
    if shape != tuple(math.prod(parameter.shape[dim] for dim in side) for side in kept):
        of_layers = "layers" in parameter.dims and "stage" in spec
        return PartitionSpec(*spec[: spec.index("stage") + 1]) if of_layers else PartitionSpec()
    return PartitionSpec(*(_of_merged(side, spec) for side in kept))


def _of_merged(side: tuple[int, ...], spec: PartitionSpec) -> Any:
    """Return the axes that shard several merged dims, or None if a dim other than the first is sharded.

    Only the first dim's shards are contiguous in the merged dim.
    """
    axes, *others = (spec[dim] for dim in side)
    return axes if all(other is None for other in others) else None
