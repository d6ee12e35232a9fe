"""Compute loss and gradients of a batch, microbatch by microbatch, in the formats of the precision policy.

The loss scale keeps float16 gradients from vanishing, since gradients below 2^-24 are zero in float16. The
loss is multiplied by a power of two before it is differentiated, and the gradients are divided by it, in
float32, where both are exact (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740). The scale adapts:
a non-finite step halves it, and `GOOD_STEPS` finite steps in a row double it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Key

from meshwright.config import BATCH_AXES
from meshwright.sharding import AnyMesh, axes_of
from meshwright.trainer.models import Outcome, Parameter, is_parameter

from ._matrices import is_matrix

Tree = Any
Loss = Callable[..., tuple[Array, Outcome]]
"""Maps parameters, model state, microbatch and key to the mean loss and the microbatch's outcome."""
Gradients = Callable[[Loss, Tree, Tree, Tree, Tree, Key[Array, ""], Tree], tuple[Array, Outcome, Tree]]
"""Maps loss, shardings, parameters, model state, batch, key and frozen parameters (None: none) to the whole
batch's mean loss, outcome (state after the last microbatch, mean metrics) and mean gradient in float32.
`gradients_of` is one. With frozen parameters, the loss takes them as the keyword `frozen`."""


def gradients_of(
    loss: Loss,
    shardings: Tree,
    parameters: Tree,
    state: Tree,
    batch: Tree,
    key: Key[Array, ""],
    frozen: Tree = None,
    summed: Collection[str] = (),
    formats: Tree = None,
) -> tuple[Array, Outcome, Tree]:
    """Return loss, outcome and mean gradient of a batch (see `Gradients`).

    With several microbatches the partitioner places one reduction in each. Gradients are summed over the
    microbatches in `formats` (`sum_formats`; None: float32), sharded as in `shardings`. Those of the groups
    `summed` are added by the loss itself, which takes their sums as the keyword `sums` (see `Model.summed`).
    """
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    loss = loss if frozen is None else partial(loss, frozen=frozen)
    grad = jax.value_and_grad(loss, has_aux=True)
    if num_microbatches == 1:
        first = jax.tree.map(lambda x: x[0], batch)
        (value, outcome), gradient = grad(parameters, state, first, jax.random.fold_in(key, 0))
        return value, outcome, jax.tree.map(lambda g: g.astype(jnp.float32), gradient)

    stacked, others = {}, parameters
    if summed:
        stacked, others = ({n: p for n, p in parameters.items() if (n in summed) is x} for x in (True, False))

    def with_sums(others: Tree, sums: Tree, *arguments: Any) -> tuple[Array, Outcome]:
        return loss({**others, **stacked}, *arguments, sums=sums)

    def add(carry: tuple[Tree, Tree, Array], item: tuple[Tree, Array]) -> tuple[Any, dict[str, Array]]:
        (state, total, value), (microbatch, index) = carry, item
        arguments, sums = (state, microbatch, jax.random.fold_in(key, index)), {n: total[n] for n in stacked}
        if stacked:
            both = jax.value_and_grad(with_sums, argnums=(0, 1), has_aux=True)
            (more, outcome), (gradient, sums) = both(others, sums, *arguments)
        else:
            (more, outcome), gradient = grad(others, *arguments)
        before = {n: total[n] for n in others} if stacked else total
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), before, gradient)
        total = {**total, **sums} if stacked else total
        total = jax.lax.with_sharding_constraint(total, shardings)
        return (outcome.state, total, value + more), outcome.metrics

    formats = jax.tree.map(lambda _: jnp.float32, parameters) if formats is None else formats
    zeros = jax.tree.map(lambda p, f: jnp.zeros(p.shape, f), parameters, formats)
    with jax.named_scope("microbatches"):
        (state, total, value), metrics = jax.lax.scan(
            add, (state, zeros, jnp.float32(0)), (batch, jnp.arange(num_microbatches))
        )
    outcome = Outcome(state, jax.tree.map(jnp.mean, metrics))
    mean = jax.tree.map(lambda g: g.astype(jnp.float32) / num_microbatches, total)
    return value / num_microbatches, outcome, mean


def gradients_by_replica(
    loss: Loss,
    shardings: Tree,
    parameters: Tree,
    state: Tree,
    batch: Tree,
    key: Key[Array, ""],
    frozen: Tree = None,
    summed: Collection[str] = (),
    formats: Tree = None,
    axes: tuple[str, ...] = (),
    in_step: Tree = None,
    of_frozen: Tree = None,
) -> tuple[Array, Outcome, Tree]:
    """Return loss, outcome and mean gradient as `gradients_of`, but reduce once a step over `axes`.

    They are `replica_axes`. Each device sums the gradients of its own tokens: rows of `data` and `expert`,
    positions of `context`. `loss` then runs on a mesh with these axes manual. It must return a value for the
    device's tokens such that the mean over them is the whole batch's loss. The model state must not depend on
    the tokens. A single microbatch is left to the partitioner, which places the reductions inside the
    backward pass, where computation can hide them. The reduction is in `formats`, as are the sums over
    microbatches. `in_step` are the PartitionSpecs of the parameters as the step uses them, `of_frozen` those
    of the frozen ones; None: they are whole along `axes`.
    """
    mesh: AnyMesh = jax.tree.leaves(shardings)[0].mesh
    if jax.tree.leaves(batch)[0].shape[0] == 1 or not axes:
        return gradients_of(loss, shardings, parameters, state, batch, key, frozen, summed, formats)

    def local(
        parameters: Tree, state: Tree, batch: Tree, key: Array, frozen: Tree
    ) -> tuple[Array, Outcome, Tree]:
        left = jax.sharding.get_abstract_mesh()
        here = jax.tree.map(lambda s: NamedSharding(left, without_axes(s.spec, axes)), shardings)
        value, outcome, mean = gradients_of(
            loss, here, parameters, state, batch, key, frozen, summed, formats
        )
        value, metrics = jax.lax.pmean((value, outcome.metrics), axes)
        if formats is not None:
            mean = jax.tree.map(lambda g, f: g.astype(f), mean, formats)
        return value, Outcome(outcome.state, metrics), jax.tree.map(lambda g: g[None], mean)

    whole = PartitionSpec()
    specs = jax.tree.map(lambda spec: only_axes(spec, axes), in_step)
    over = jax.tree.map(lambda spec: axes_beside(spec, axes), specs)
    frozen_specs = whole if of_frozen is None else jax.tree.map(lambda s: only_axes(s, axes), of_frozen)
    each = jax.shard_map(
        local,
        mesh=mesh,
        axis_names=set(axes),
        in_specs=(specs, whole, rows_spec(axes), whole, frozen_specs),
        out_specs=(
            whole,
            whole,
            jax.tree.map(lambda spec, its: PartitionSpec(its or None, *spec), specs, over),
        ),
        check_vma=False,
    )
    value, outcome, parts = each(parameters, state, batch, key, frozen)
    return value, outcome, mean_over_parts(parts, shardings, axes, over)


def rows_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Return the PartitionSpec of a batch [microbatches, rows, ...] in code that is manual along `axes`.

    Along `context` it is whole: the model takes its positions, which lie apart in the window.
    """
    return PartitionSpec(None, tuple(axis for axis in BATCH_AXES if axis in axes) or None)


def axes_beside(spec: PartitionSpec, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes among `axes` that do not split an array with this PartitionSpec."""
    splitting = {axis for part in spec for axis in axes_of(part)}
    return tuple(axis for axis in axes if axis not in splitting)


def mean_over_parts(parts: Tree, shardings: Tree, axes: tuple[str, ...], over: Tree) -> Tree:
    """Average arrays [parts, ...] over their first dim.

    They cross the network in their own format, and the results are in float32. Each array takes one
    all-reduce over its axes. If `shardings` shard a dim of its result over some of them, it takes one
    reduce-scatter over these, and an all-reduce of what is left over the others.

    Args:
        axes: of the replicas, by whose number all sums are divided.
        over: for each array, the axes along which its first dim lies. Experts have no parts over `expert`:
            theirs are sums over it already.
    """
    mesh: AnyMesh = jax.tree.leaves(shardings)[0].mesh
    num_parts = math.prod(mesh.shape[axis] for axis in axes)

    def mean(total: Array, spec: PartitionSpec, left: tuple[str, ...]) -> Array:
        for place, split in enumerate(spec):
            scattered = tuple(axis for axis in axes_of(split) if axis in left)
            if scattered:
                total = jax.lax.psum_scatter(total, scattered, scatter_dimension=place, tiled=True)
                left = tuple(axis for axis in left if axis not in scattered)
        total = jax.lax.psum(total, left) if left else total
        return total.astype(jnp.float32) / num_parts

    def local(parts: Tree) -> Tree:
        return jax.tree.map(lambda part, s, its: mean(part[0], s.spec, its), parts, shardings, over)

    inputs = jax.tree.map(
        lambda s, its: PartitionSpec(its or None, *without_axes(s.spec, its)), shardings, over
    )
    results = jax.tree.map(lambda s: s.spec, shardings)
    with jax.named_scope("replicas"):
        return jax.shard_map(local, mesh=mesh, in_specs=(inputs,), out_specs=results, check_vma=False)(parts)


def without_axes(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """Return `spec` without `axes`: the remaining sharding inside code that is manual along `axes`."""
    left = (tuple(axis for axis in axes_of(part) if axis not in axes) for part in spec)
    return PartitionSpec(*(part if len(part) > 1 else part[0] if part else None for part in left))


def only_axes(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """Return `spec` with `axes` alone: the sharding at the edge of code that is manual along `axes`."""
    return without_axes(spec, {axis for part in spec for axis in axes_of(part) if axis not in axes})


def sum_formats(declared: Tree, gradient_sum: str) -> Tree:
    """Return the format in which the gradients of each declared parameter are summed.

    It is that of the config's key `gradient_sum` for matrices and tables. Gradients of norms and biases and
    of parameters that compute in float32, which are few, are always summed in float32.
    """

    def one(parameter: Parameter) -> Any:
        is_narrow = gradient_sum == "bf16" and is_matrix(parameter) and not parameter.wide
        return jnp.bfloat16 if is_narrow else jnp.float32

    return jax.tree.map(one, declared, is_leaf=is_parameter)


FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.bfloat16}
"""The compute format of each precision; under fp8 the layers' products are narrower."""
FIRST_SCALE = 2.0**15
MOST_SCALE = 2.0**24  # a float32 loss times this stays far from overflow
LEAST_SCALE = 1.0  # a step that is non-finite at this scale is a bad step
GOOD_STEPS = 2000  # as in the libraries of the paper's authors


def initial_scale(precision: str) -> Tree:
    """Return the initial state of the loss scale, {"loss_scale": {scale, good_steps}}; {} unless fp16."""
    if precision != "fp16":
        return {}
    return {"loss_scale": {"scale": jnp.float32(FIRST_SCALE), "good_steps": jnp.int32(0)}}


def scaled_gradients(
    gradients: Gradients, loss: Loss, shardings: Tree, state: Tree, batch: Tree, key: Key[Array, ""]
) -> tuple[Array, Outcome, Tree]:
    """Compute `gradients` at the state's parameters, using the scaled loss if the state has a loss scale.

    The returned loss and gradients are unscaled, in float32.
    """
    before, frozen = (state["parameters"], state["model_state"]), state.get("frozen")
    if "loss_scale" not in state:
        return gradients(loss, shardings, *before, batch, key, frozen)
    scale = state["loss_scale"]["scale"]

    def scaled(*arguments: Any, **frozen: Tree) -> tuple[Array, Outcome]:
        value, outcome = loss(*arguments, **frozen)
        return value * scale, outcome

    value, outcome, gradient = gradients(scaled, shardings, *before, batch, key, frozen)
    return value / scale, outcome, jax.tree.map(lambda g: g / scale, gradient)


def next_scale(state: Tree, applied: Bool[Array, ""]) -> Tree:
    """Return the state of the loss scale after a step, which was `applied` or not finite; {} unless fp16."""
    if "loss_scale" not in state:
        return {}
    scale, good = state["loss_scale"]["scale"], state["loss_scale"]["good_steps"] + 1
    grown = jnp.where(good >= GOOD_STEPS, jnp.minimum(scale * 2, MOST_SCALE), scale)
    return {
        "loss_scale": {
            "scale": jnp.where(applied, grown, jnp.maximum(scale / 2, LEAST_SCALE)),
            "good_steps": jnp.where(applied & (good < GOOD_STEPS), good, 0),
        }
    }


def scale_metrics(state: Tree) -> dict[str, Array]:
    """Return the metric `loss_scale`, by which the step's loss was multiplied; {} unless fp16."""
    return {"loss_scale": state["loss_scale"]["scale"]} if "loss_scale" in state else {}
