"""Build the train step of a config on a mesh.

The state is a dict: `parameters` and `optimizer` in the formats of the section `state`, `model_state` (what
the model keeps in addition to parameters), `key` (the run's random key), `step`, under fp16 `loss_scale`, and
`master` if the section `state` has one.
The batch has a leading dim of microbatches; gradients are summed over it in the format `gradient_sum`.

Adapters (`lora`): `parameters` are those of the adapters alone, and `frozen` are the model's, in the compute
format. Gradients and moments exist for `parameters`. `whole_parameters` puts both together.

Offload: optimizer state may be kept in host memory between steps. It is copied to the devices for the update
and back after it, so its bytes cross the host's link twice per step. So may stacked layers: a pass fetches
each layer, and the update copies them as it does moments, one layer after another (`contrib.offload`).
ZeRO-1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5): parameters and moments are
sharded over `data` and `context` too, and each device updates its part. Gradients are reduce-scattered over
both. Parameters are all-gathered in the compute format when a step begins; the copy is dropped at its end.
So it is over `expert` for all but the experts. Without ZeRO-1 they are gathered over `expert` as over `fsdp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from meshwright.config import (
    FIRST_LAYERS,
    IdxData,
    InstructionData,
    RunConfig,
    num_stacked_layers,
    padded_layers,
)
from meshwright.registry import room
from meshwright.sharding import (
    AnyMesh,
    activation_spec,
    batch_axes,
    mesh_here,
    parameter_spec,
    replica_axes,
)
from meshwright.trainer.models import (
    Context,
    Model,
    Outcome,
    Parameter,
    initial_parameters,
    is_parameter,
    model_of,
    with_experts_over,
)

from . import _gradients as grads
from ._matrices import is_matrix
from ._optimizer import moment_shardings, optimizer_of, schedule_of
from ._padded_tables import PaddedTables, spec_in_step
from ._state_update import (
    Change,
    MomentFormats,
    Scalars,
    Update,
    formats_of_moments,
    kept_parameters,
    on_host,
    stacked_layers,
)

Tree = Any
HOST = "pinned_host"  # memory that devices access without the host's help
KEPT = ("parameters", "master", "optimizer", "model_state")  # what a step changes, and keeps if it went wrong
_Gradients = Callable[[Tree, Tree], tuple[Array, Outcome, Tree]]  # arguments: state and batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """A train step on a mesh, and everything needed to lower or to run it.

    `step(state, batch) -> (state, metrics)` is jitted and donates the state. If loss or gradient is not
    finite, only `step` and `loss_scale` change, and the metric `applied` is 0.
    `init(seed) -> state` creates the state with its shardings.
    `evaluate(parameters, model_state, batch) -> metrics` evaluates held-out data; its parameters are those
    of `whole_parameters`.
    `inspect(state, batch) -> tree` counts non-finite numbers in batch, parameters, loss and gradients.
    `state` and `batch` are the abstract arguments of `step`: trees of `jax.ShapeDtypeStruct` with shardings.
    """

    step: Callable[[Tree, Tree], tuple[Tree, dict[str, Array]]]
    init: Callable[[Array], Tree]
    evaluate: Callable[[Tree, Tree, Tree], dict[str, Array]]
    inspect: Callable[[Tree, Tree], Tree]
    state: Tree
    batch: Tree


def build_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """Build the train step of `config` on `mesh`.

    The config must be resolved and checked on that layout.

    >>> import jax
    >>> from meshwright.config import load_config
    >>> from meshwright.sharding import mesh_of
    >>> built = build_step(load_config("linear"), mesh_of((("data", 1),), jax.devices()[:1]))
    >>> {name: array.shape for name, array in built.batch.items()}
    {'inputs': (1, 64, 16), 'targets': (1, 64)}
    """
    model = model_of(config.model)
    frozen, declared = declarations(config, model, mesh.shape.get("stage", 1))
    optimizer = optimizer_of(config, declared, mesh)
    moments = formats_of_moments(config, declared, optimizer)
    context_of, init = _contexts(config, mesh), _init_of(config, model, declared, optimizer, moments)
    holds, split = config.waits("parameters"), partial(_split, config)
    placed = {"frozen": frozen, "zero1": config.zero1, "on_host": on_host(config)}
    state, batch = abstract_state(init, declared, mesh, **placed), abstract_batch(config, mesh)
    state_shardings, batch_shardings = (jax.tree.map(lambda s: s.sharding, tree) for tree in (state, batch))
    tables = PaddedTables(model.parameters(), mesh, config.zero1)
    used = tables.declared(declared)
    shardings = tables.shardings(_by_dims(used, mesh, config.zero1))  # of gradients, while a step computes
    formats, pipeline = grads.sum_formats(used, config.gradient_sum), None
    if mesh.shape.get("stage", 1) > 1:
        pipeline = _pipeline_of(config, model, used, context_of, shardings, formats)
    sums = partial(_sums_of(config, model, used, context_of(None)), formats=formats)

    def loss(
        parameters: Tree, model_state: Tree, batch: Tree, key: Any, frozen: Tree = None, sums: Tree = None
    ) -> tuple[Array, Outcome]:
        context = replace(context_of(key), sums=sums, held=frozen if holds else None)
        if frozen is not None and not holds:
            parameters = whole_parameters({"frozen": frozen, "parameters": parameters})
        return model.loss(parameters, model_state, batch, context)

    def evaluate(parameters: Tree, model_state: Tree, batch: Tree) -> dict[str, Array]:
        parameters, held = split(parameters)
        parameters = _as_computed(config, used, shardings, tables.widened(parameters), batch)
        if pipeline is not None:
            return pipeline.metrics(parameters, batch)
        return _mean_metrics(lambda microbatch: loss(parameters, model_state, microbatch, None, held), batch)

    def gradients(state: Tree, batch: Tree) -> tuple[Array, Outcome, Tree]:
        parameters, held = split(state["parameters"])
        computed = _as_computed(config, used, shardings, tables.widened(parameters), batch)
        base = held if frozen is None else tables.widened(state["frozen"])
        now = {**state, "parameters": computed, "frozen": base}
        key = step_key(state)
        if pipeline is not None:
            value, outcome, gradient = pipeline.scaled_gradients(now, batch, key)
        else:
            value, outcome, gradient = grads.scaled_gradients(sums, loss, shardings, now, batch, key)
        return value, outcome, tables.narrowed(gradient)

    replicated, arguments = NamedSharding(mesh, PartitionSpec()), (state_shardings, batch_shardings)
    results = (state_shardings, replicated)
    update = Update(config, declared, mesh, optimizer, moments)
    step = _step(update, gradients, _by_dims(declared, mesh, config.zero1))
    evaluated = (whole_parameters(state_shardings), state_shardings["model_state"])
    return TrainStep(
        step=jax.jit(step, donate_argnums=0, in_shardings=arguments, out_shardings=results),
        init=jax.jit(init, out_shardings=state_shardings),
        evaluate=jax.jit(evaluate, in_shardings=(*evaluated, batch_shardings), out_shardings=replicated),
        inspect=jax.jit(_inspect(gradients, holds), in_shardings=arguments, out_shardings=replicated),
        state=state,
        batch=batch,
    )


def _split(config: RunConfig, parameters: Tree) -> tuple[Tree, Tree]:
    """Return parameters that have gradients on the devices, and the layers in host memory or None.

    Such layers are given to the loss as adapters' base is, without a gradient.
    """
    if not config.waits("parameters"):
        return parameters, None
    return room("offload").with_stand_ins(parameters)


def _as_computed(config: RunConfig, declared: Tree, shardings: Tree, parameters: Tree, batch: Tree) -> Tree:
    """Return the parameters as all microbatches of a batch use them.

    With ZeRO-1 they are gathered over the replicas, and in a pipeline all are cast to the compute
    format. Otherwise the matrices of stacked layers are cast, unless there is one microbatch, which casts
    them itself. Tables then stay in float32, in which the loss adds up their gradients. All stay so where
    gradients are to be float32, for autodiff gives a gradient the format of its parameter.
    """
    dtype = grads.FORMATS[config.precision]
    if config.zero1 or jax.tree.leaves(shardings)[0].mesh.shape.get("stage", 1) > 1:
        return whole_over_replicas(parameters, declared, shardings, dtype, config.zero1)
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    if config.lora.rank is not None or num_microbatches == 1 or config.gradient_sum == "all-fp32":
        return parameters

    def one(declared: Parameter, x: Array) -> Array:
        is_cast = "layers" in declared.dims and is_matrix(declared) and not declared.wide
        return x.astype(dtype) if is_cast else x

    return jax.tree.map(one, declared, parameters, is_leaf=is_parameter)


def _pipeline_of(*parts: Any) -> Any:
    """Return the pipeline of a run over several stages, by a room outside the core."""
    return room("pipelines").pipeline_of(*parts)


def _sums_of(config: RunConfig, model: Model, used: Tree, context: Context) -> Callable[..., Any]:
    """Return the function that sums gradients over the microbatches, without stages.

    A model with state computes statistics over the whole batch, so it must see all replicas at once.
    """
    summed = () if config.lora.rank is not None else model.summed(context)
    if jax.tree.leaves(model.state()):
        return partial(grads.gradients_of, summed=summed)
    mesh = context.mesh
    in_step = jax.tree.map(lambda s: s.spec, _by_dims(used, mesh, config.zero1, in_step=True))
    axes = replica_axes(mesh, config.zero1)
    of_frozen = stacked_layers(in_step) if config.waits("parameters") else None
    return partial(grads.gradients_by_replica, summed=summed, axes=axes, in_step=in_step, of_frozen=of_frozen)


def whole_parameters(state: Tree) -> Tree:
    """Return all parameters with which the model computes: those that are trained, and the frozen ones."""
    trained = state["parameters"]
    return room("lora").with_adapters(state["frozen"], trained) if "frozen" in state else trained


def declarations(config: RunConfig, model: Model, num_stages: int) -> tuple[Tree, Tree]:
    """Return the declarations of frozen and of trained parameters; the first are None without adapters.

    Over several stages the layers are padded so that they divide, and layers [layers, ...] in several chunks
    are [chunks, layers / chunks, ...]: the same numbers in order. First layers that are unlike are on each.
    """
    whole = with_experts_over(model.parameters(), config.fold_experts)
    if config.lora.rank is None:
        declared = whole
        if num_stages == 1:
            return None, declared
        num_layers, num_chunks = padded_layers(config, num_stages), config.pipeline_chunks
        unpadded = num_stacked_layers(config) or num_layers

        def staged(p: Parameter) -> Parameter:
            rows = p.shape[0] * num_layers // unpadded
            if num_chunks == 1:
                return replace(p, shape=(rows, *p.shape[1:]))
            shape = (num_chunks, rows // num_chunks, *p.shape[1:])
            return replace(p, shape=shape, dims=("chunks", *p.dims))

        def on_each(p: Parameter) -> Parameter:
            return replace(p, dims=("first_layers", *p.dims[1:]))

        changes = {"layers": staged, FIRST_LAYERS: on_each}
        changed = {
            name: jax.tree.map(changes[name], declared[name], is_leaf=is_parameter)
            for name in changes if name in declared
        }  # fmt: skip
        return None, {**declared, **changed}
    adapters = room("lora")
    return adapters.frozen_declarations(config, whole), adapters.adapter_declarations(model, config.lora)


def _init_of(
    config: RunConfig, model: Model, declared: Tree, optimizer: Any, moments: MomentFormats
) -> Callable[[Array], Tree]:
    """Return the function, not jitted, that creates a state from a seed."""

    def init(seed: Array) -> Tree:
        root = jax.random.key(seed)
        parameters = initial_parameters(declared, jax.random.fold_in(root, 0))
        num_layers = num_stacked_layers(config)
        if num_layers is not None and "layers" in parameters:
            layers = partial(_without_padding, num_layers)
            parameters |= {
                "layers": jax.tree.map(layers, declared["layers"], parameters["layers"], is_leaf=is_parameter)
            }
        return {
            **kept_parameters(config.state, declared, parameters),
            **({} if config.lora.rank is None else {"frozen": _frozen_parameters(config, model, root)}),
            "model_state": initial_parameters(model.state(), root),
            "optimizer": moments.narrowed(optimizer.init(parameters)),
            "key": jax.random.key_data(jax.random.fold_in(root, 1)),
            "step": jnp.int32(0),
            **grads.initial_scale(config.precision),
        }

    return init


def _without_padding(num_layers: int, declared: Parameter, x: Array) -> Array:
    """Return stacked layers with zeros in those beyond the model's, which pad a pipeline's stages."""
    num_stacked = 1 + ("chunks" in declared.dims)
    held = math.prod(x.shape[:num_stacked])
    if held <= num_layers or "layers" not in declared.dims:
        return x
    is_layer = jnp.arange(held).reshape(x.shape[:num_stacked]) < num_layers
    return jnp.where(is_layer.reshape(*is_layer.shape, *(1,) * (x.ndim - num_stacked)), x, 0)


def _frozen_parameters(config: RunConfig, model: Model, root: Key[Array, ""]) -> Tree:
    """Return the frozen parameters of a new run, drawn as if they were trained, in their format."""
    declared = model.parameters()
    drawn = initial_parameters(declared, jax.random.fold_in(root, 0))
    return room("lora").frozen_parameters(config, declared, drawn)


def _mean_metrics(loss: Callable[[Tree], tuple[Array, Outcome]], batch: Tree) -> dict[str, Array]:
    """Return the mean loss and metrics of a batch's microbatches."""

    def one(microbatch: Tree) -> dict[str, Array]:
        value, outcome = loss(microbatch)
        return {"loss": value, **outcome.metrics}

    return jax.tree.map(jnp.mean, jax.lax.map(one, batch))


def _contexts(config: RunConfig, mesh: Mesh) -> Callable[[Key[Array, ""] | None], Context]:
    """Return the function that makes a model's `Context` from a microbatch's key.

    The context's mesh is the mesh that the calling code sees. A key of None means evaluation.
    """
    device = mesh.devices.flat[0]
    platform: str = device.platform
    in_loop = _num_microbatches(config, mesh) > 1
    major, minor = device.compute_capability.split(".") if platform == "gpu" else (0, 0)

    def context_of(key: Key[Array, ""] | None) -> Context:
        return Context(
            mesh=mesh_here(mesh),
            dtype=grads.FORMATS[config.precision],
            platform="cuda" if platform == "gpu" else platform,
            compute_capability=(int(major), int(minor)),
            remat=config.remat,
            layer_loop="keep" if config.waits("parameters") else config.layer_loop,
            fold_experts=config.fold_experts,
            expert_domains=config.expert_domains or 1,
            zero1=config.zero1,
            offloads=config.waits("activations"),
            fp8=config.precision == "fp8",
            wide_gradients=config.gradient_sum == "all-fp32",
            adapter_scale=None if config.lora.rank is None else config.lora.scale,
            dropout_key=key,
            training=key is not None,
            in_loop=in_loop,
        )

    return context_of


def _step(update: Update, gradients: _Gradients, shardings: Tree) -> Any:
    """Return the step, not jitted: gradients over the microbatches, then one update if they are finite."""
    config, rate = update.config, schedule_of(update.config)
    bias_rate = getattr(config.model, "router_bias_rate", 0.0)

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, Array]]:
        old = {name: state[name] for name in KEPT if name in state}
        value, outcome, gradient = gradients(state, batch)
        with jax.named_scope("optimizer"):
            gradient = jax.lax.with_sharding_constraint(gradient, shardings)
            excess = gradient
            if bias_rate:
                gradient = room("experts").without_excess(gradient)
            norm = optax.tree.norm(gradient)
            applied = jnp.isfinite(value) & jnp.isfinite(norm)
            learning_rate = jnp.asarray(rate(state["step"]), jnp.float32)
            change = Change(gradient, excess, outcome.state)
            key = step_key(state) if config.state.rounds else None
            new, norm = update(old, change, Scalars(learning_rate, applied, key), norm)
        metrics = {
            "loss": value,
            "gradient_norm": norm,
            "learning_rate": learning_rate,
            "applied": applied.astype(jnp.int32),
            **grads.scale_metrics(state),
            **outcome.metrics,
        }
        new |= grads.next_scale(state, applied)
        return {**state, **new, "step": state["step"] + 1}, metrics

    return step


def step_key(state: Tree) -> Key[Array, ""]:
    """Return the random key of the step that a state is before."""
    return jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])


def _inspect(gradients: _Gradients, holds: bool) -> Any:
    """Return the function, not jitted, that counts non-finite numbers: the causes of a step not applied."""

    def inspect(state: Tree, batch: Tree) -> Tree:
        value, _, gradient = gradients(state, batch)
        parameters = state["parameters"]
        if holds:
            space = jax.memory.Space.Device
            layers = jax.tree.map(lambda x: jax.device_put(x, space), stacked_layers(parameters))
            parameters = {**parameters, **layers}
        inspected = {"batch": batch, "parameters": parameters, "loss": value, "gradients": gradient}
        return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x)), inspected)  # integers are always finite

    return inspect


def whole_over_replicas(
    parameters: Tree, declared: Tree, shardings: Tree, dtype: jax.typing.DTypeLike, zero1: bool = True
) -> Tree:
    """Return the copy of the parameters with which a step computes: cast, and under ZeRO-1 gathered.

    Under ZeRO-1 it is whole over the replicas, and a pipeline's head is whole over `stage`. It stays
    sharded by the other axes. Matrices and tables are cast to `dtype` before they cross the network. Vectors
    stay in float32, and so do matrices with `Parameter.wide`.

    Args:
        shardings: of `parameters`, a tree of the same structure.
    """

    def one(declared: Parameter, x: Array, split: NamedSharding) -> Array:
        cast = x.astype(dtype if is_matrix(declared) and not declared.wide else jnp.float32)
        whole = NamedSharding(split.mesh, spec_in_step(declared, split.mesh, zero1, in_step=True))
        if not zero1 and split == whole:
            return cast
        # Without the inner constraint the partitioner gathers before it casts, which moves twice the bytes.
        return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(cast, split), whole)

    with jax.named_scope("gather_over_data"):
        return jax.tree.map(one, declared, parameters, shardings, is_leaf=is_parameter)


def abstract_state(
    init: Any,
    declared: Tree,
    mesh: Mesh,
    *,
    frozen: Tree = None,
    zero1: bool = False,
    on_host: tuple[str, ...] = (),
) -> Tree:
    """Return the state's shapes with their shardings; moments are sharded as their parameters.

    `declared` and `frozen` are the declarations of trained and of frozen parameters.

    The parts `on_host` are in the memory of their device's host; of parameters, stacked layers. Described
    devices, which are not present, list no memories and ignore the memory kind: there the worker names it.
    """
    shapes = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: replicated, shapes)

    shardings["parameters"] = _by_dims(declared, mesh, zero1)
    if frozen is not None:
        shardings["frozen"] = _by_dims(frozen, mesh, zero1)
    shardings["optimizer"] = moment_shardings(shapes["optimizer"], declared, mesh, zero1)
    if "master" in shapes:
        shardings["master"] = moment_shardings(shapes["master"], declared, mesh, zero1)
    in_host = lambda s, x: s.with_memory_kind(HOST) if x.ndim else s  # noqa: E731
    for name in on_host:
        if name == "parameters":
            held = stacked_layers(declared)
            shardings[name] |= {n: jax.tree.map(in_host, shardings[name][n], shapes[name][n]) for n in held}
        elif name in shapes:
            shardings[name] = jax.tree.map(in_host, shardings[name], shapes[name])
    described = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    return jax.tree.map(described, shapes, shardings)


def _by_dims(declared: Tree, mesh: AnyMesh, zero1: bool, *, in_step: bool = False) -> Tree:
    """Return the shardings of declared parameters at rest, or as a step uses them."""
    return jax.tree.map(
        lambda p: NamedSharding(mesh, parameter_spec(p.dims, mesh, zero1, p.shape, in_step=in_step)),
        declared,
        is_leaf=is_parameter,
    )


def _num_microbatches(config: RunConfig, mesh: Mesh) -> int:
    """Return the number of microbatches of a step."""
    assert config.batch.sequences_per_replica is None, "resolve the batch on its layout first"
    replicas = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    return config.batch.sequences // (
        config.batch.sequences
        if config.batch.microbatch_sequences is None
        else config.batch.microbatch_sequences * replicas
    )


def abstract_batch(config: RunConfig, mesh: Mesh) -> Tree:
    """Return the batch's shapes and shardings: [microbatches, rows, ...], rows sharded over the replicas."""
    num_microbatches = _num_microbatches(config, mesh)
    rows = config.batch.sequences // num_microbatches

    def array(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, activation_spec(("microbatch", "batch"), mesh))
        return jax.ShapeDtypeStruct((num_microbatches, rows, *rest), dtype, sharding=sharding)

    model = config.model
    if model.takes == "sequences":
        tokens = array(jnp.int32, config.batch.sequence_length + 1)
        if isinstance(config.data, InstructionData):
            return {"tokens": tokens, "segments": tokens, "answers": tokens}
        return {"tokens": tokens, "segments": tokens} if config.has_documents else {"tokens": tokens}
    if model.takes == "images":
        images = {"images": array(jnp.float32, *model.sizes.input_shape), "labels": array(jnp.int32)}
        return {**images, "weights": array(jnp.float32)} if isinstance(config.data, IdxData) else images
    return {"inputs": array(jnp.float32, *model.sizes.input_shape), "targets": array(jnp.float32)}
