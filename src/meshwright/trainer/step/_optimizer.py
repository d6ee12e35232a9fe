"""Build the optimizer of a run and the schedule of its learning rate, and shard the optimizer's moments.

Moments have the sharding of their parameter, or of those of its dims that they keep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright import config as sections
from meshwright.registry import room
from meshwright.sharding import axis_size, parameter_spec
from meshwright.trainer.models import Parameter, is_parameter

from ._matrices import by_matrix, is_hidden_matrix, is_matrix, matrix_dims, merged_entry

Tree = Any


class EightBits(NamedTuple):
    """A moment in eight bits: codes in the parameter's shape, and the scales of its blocks."""

    codes: Any
    scales: Any


def is_eight_bits(x: Any) -> bool:
    """Return whether a leaf of a state is a moment in eight bits."""
    return isinstance(x, EightBits)


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


def optimizer_of(
    config: sections.RunConfig, declared: Tree, mesh: Mesh | None = None, *, clips: bool = True
) -> optax.GradientTransformation:
    """Return the optimizer of `config` for a learning rate of 1; the step multiplies by the actual rate.

    `declared` is the model's tree of parameter declarations. By default weight decay applies to matrices and
    tables, not to norms and biases; `weight_decay_on` may extend it to all parameters. `mesh`: of the step;
    without it nothing is split over devices. `clips`: not if the gradient has been clipped before.
    """
    chosen = config.optimizer
    decays_all = chosen.weight_decay_on == "all"
    update = chosen.update(_Declared(declared, mesh, decays_all=decays_all, zero1=config.zero1))
    clip = chosen.clip_norm
    if clip is None:
        return update
    return optax.chain(optax.clip_by_global_norm(clip) if clips else optax.identity(), update)


class _Declared:
    """Say what an optimizer asks of the parameters (`config.Parameters`), from their declarations."""

    def __init__(self, declared: Tree, mesh: Mesh | None, *, decays_all: bool, zero1: bool) -> None:
        self._declared, self._mesh, self._zero1 = declared, mesh, zero1
        self.decayed = jax.tree.map(lambda p: decays_all or is_matrix(p), declared, is_leaf=is_parameter)

    def split(self, hidden: Callable[[Parameter], Any], other: Any) -> Tree:
        pick = lambda p: hidden(p) if is_hidden_matrix(p) else other  # noqa: E731
        return jax.tree.map(pick, self._declared, is_leaf=is_parameter)

    def sizes(self, parameter: Parameter) -> tuple[int, int]:
        return matrix_dims(parameter).inputs_outputs(parameter.shape)

    def orthogonal(self, matrices: Tree, num_steps: int) -> Tree:
        hidden = self.split(lambda parameter: parameter, optax.MaskedNode())
        parameters = jax.tree.leaves(hidden, is_leaf=is_parameter)
        arrays, structure = jax.tree.flatten(matrices)
        orthogonal = room("muon").orthogonal
        return structure.unflatten(orthogonal(parameters, arrays, num_steps, self._mesh, self._zero1))

    def by_matrix(self, update: optax.GradientTransformation) -> optax.GradientTransformation:
        return by_matrix(update, self._declared)


def owner_of(path: tuple[Any, ...], parameters: dict[str, Parameter]) -> tuple[str, Parameter] | None:
    """Return a moment's name ("mu", "muon.mu") and its parameter, given the moment's path; None if it has
    none.

    The path of a moment ends with that of its parameter, before which Optax has the moment's name.
    """
    tails = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
    owner = next((tail for tail in tails if tail in parameters), None)
    if owner is None:
        return None
    before = jax.tree_util.keystr(path).removesuffix(owner)
    group = re.search(r"\.inner_states\['(\w+)'\]", before)
    name = before.rpartition(".")[2]
    return f"{group[1]}.{name}" if group else name, parameters[owner]


def parameters_by_path(declared: Tree) -> dict[str, Parameter]:
    """Return the declarations of parameters by their paths in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_parameter)
    return {jax.tree_util.keystr(path): parameter for path, parameter in leaves}


def moment_shardings(state: Tree, declared: Tree, mesh: Mesh, zero1: bool = False) -> Tree:
    """Return the shardings of an optimizer's state, given the state's shapes.

    An array whose path ends with a parameter's path is that parameter's moment. A moment of the parameter's
    shape has its sharding, and so have the codes of a moment in eight bits. A moment of its matrices' rows or
    columns is sharded as these are, and so are the scales of blocks. Arrays that belong to no parameter (step
    counts) or keep none of its dims are replicated. Of layers that stages share, every array with a number
    for each layer is sharded over `stage`, as a checkpoint expects.
    """
    parameters = parameters_by_path(declared)
    stacks = (
        (p.shape[: p.dims.index("layers") + 1], p.dims[: p.dims.index("layers") + 1])
        for p in parameters.values()
        if "layers" in p.dims
    )
    layers = {shape: parameter_spec(dims, mesh) for shape, dims in stacks if axis_size(mesh, "stage") > 1}

    def sharding(path: tuple[Any, ...], moment: Any) -> Any:
        if (owned := owner_of(path, parameters)) is None:
            spec = next((spec for shape, spec in layers.items() if moment.shape[: len(shape)] == shape), ())
            return NamedSharding(mesh, PartitionSpec(*spec))
        name, parameter = owned
        spec = parameter_spec(parameter.dims, mesh, zero1, parameter.shape)
        if is_eight_bits(moment):
            scales = NamedSharding(mesh, room("eight_bit_states").spec_of_scales(parameter, spec, mesh))
            return EightBits(codes=NamedSharding(mesh, spec), scales=scales)
        if moment.shape != parameter.shape:
            spec = _spec_of_sides(name.rpartition(".")[2], moment.shape, parameter, spec)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, state, is_leaf=is_eight_bits)


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
    return PartitionSpec(*(merged_entry(side, spec) for side in kept))
