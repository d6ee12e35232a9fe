"""The one builder of the train step.

State, a dict: `parameters` and the optimizer's moments in float32, `model_state` (empty until a
model keeps any), `optimizer`, `key` (the run's random key), `step`. The batch has a leading
dimension of microbatches; gradients are summed over it in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..config import LeNetModel, LinearModel, RunConfig, TransformerModel
from ..models import Context, Parameter, initial_parameters, model_of
from ..sharding import activation_spec, parameter_spec
from ._optimizer import optimizer_of, schedule_of

Tree = Any
FORMATS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """A train step on a mesh, and everything needed to lower or to run it.

    `step(state, batch) -> (state, metrics)` is jitted and donates the state; `init(seed) -> state`
    makes the state where it belongs; `evaluate(parameters, batch) -> loss`. `state` and `batch` are
    trees of `jax.ShapeDtypeStruct` with shardings: the abstract arguments of `step`.
    """

    step: Callable[[Tree, Tree], tuple[Tree, Tree]]
    init: Callable[[Array], Tree]
    evaluate: Callable[[Tree, Tree], Array]
    state: Tree
    batch: Tree


def _platform(mesh: Mesh) -> str:
    platform: str = mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


def build_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """The train step of `config` on `mesh`. The config has been checked against the layout."""
    model = model_of(config.model)
    declared = model.parameters()
    optimizer = optimizer_of(config, declared)

    def init(seed: Array) -> Tree:
        root = jax.random.key(seed)
        parameters = initial_parameters(declared, jax.random.fold_in(root, 0))
        return {
            "parameters": parameters,
            "model_state": {},
            "optimizer": optimizer.init(parameters),
            "key": jax.random.key_data(jax.random.fold_in(root, 1)),
            "step": jnp.int32(0),
        }

    state = _abstract_state(init, optimizer, declared, mesh)
    batch = _abstract_batch(config, mesh)
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch_shardings = jax.tree.map(lambda leaf: leaf.sharding, batch)

    def loss(parameters: Tree, microbatch: Tree, key: Array | None) -> Array:
        context = Context(
            mesh=mesh,
            dtype=FORMATS[config.precision],
            platform=_platform(mesh),
            remat=config.remat,
            dropout_key=key,
        )
        return model.loss(parameters, microbatch, context)

    step = _step(config, optimizer, loss, jax.tree.map(lambda s: s.sharding, state["parameters"]))
    replicated = NamedSharding(mesh, PartitionSpec())
    return TrainStep(
        step=jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(state_shardings, batch_shardings),
            out_shardings=(state_shardings, replicated),
        ),
        init=jax.jit(init, out_shardings=state_shardings),
        evaluate=jax.jit(
            lambda parameters, batch: jnp.mean(jax.lax.map(lambda b: loss(parameters, b, None), batch)),
            in_shardings=(state_shardings["parameters"], batch_shardings),
            out_shardings=replicated,
        ),
        state=state,
        batch=batch,
    )


def _step(config: RunConfig, optimizer: Any, loss: Any, shardings: Tree) -> Any:
    """The undecorated step: gradients over the microbatches, then one update."""
    rate = schedule_of(config)

    def gradients(parameters: Tree, batch: Tree, key: Array) -> tuple[Array, Tree]:
        num_microbatches = jax.tree.leaves(batch)[0].shape[0]
        grad = jax.value_and_grad(loss)
        if num_microbatches == 1:
            return grad(parameters, jax.tree.map(lambda x: x[0], batch), jax.random.fold_in(key, 0))

        def add(carry: tuple[Array, Tree], item: tuple[Tree, Array]) -> tuple[tuple[Array, Tree], None]:
            microbatch, index = item
            value, gradient = grad(parameters, microbatch, jax.random.fold_in(key, index))
            total = jax.tree.map(jnp.add, carry, (value, gradient))
            return (total[0], jax.lax.with_sharding_constraint(total[1], shardings)), None

        zeros = jax.tree.map(jnp.zeros_like, parameters)
        with jax.named_scope("microbatches"):
            (value, total), _ = jax.lax.scan(
                add, (jnp.float32(0), zeros), (batch, jnp.arange(num_microbatches))
            )
        return value / num_microbatches, jax.tree.map(lambda g: g / num_microbatches, total)

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
        value, gradient = gradients(state["parameters"], batch, key)
        with jax.named_scope("optimizer"):
            gradient = jax.lax.with_sharding_constraint(gradient, shardings)
            updates, moments = optimizer.update(gradient, state["optimizer"], state["parameters"])
            parameters = optax.apply_updates(state["parameters"], updates)
            metrics = {
                "loss": value,
                "gradient_norm": optax.tree.norm(gradient),
                "learning_rate": jnp.asarray(rate(state["step"]), jnp.float32),
            }
        return {
            **state,
            "parameters": parameters,
            "optimizer": moments,
            "step": state["step"] + 1,
        }, metrics

    return step


def _abstract_state(init: Any, optimizer: Any, declared: Tree, mesh: Mesh) -> Tree:
    """The state's shapes with their shardings; each moment lies where its parameter lies."""
    shapes = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    replicated = NamedSharding(mesh, PartitionSpec())
    at_rest = jax.tree.map(
        lambda p: NamedSharding(mesh, parameter_spec(p.dims, mesh)),
        declared,
        is_leaf=lambda p: isinstance(p, Parameter),
    )
    shardings = jax.tree.map(lambda _: replicated, shapes)
    shardings["parameters"] = at_rest
    shardings["optimizer"] = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes["optimizer"],
        at_rest,
        transform_non_params=lambda _: replicated,
    )
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _abstract_batch(config: RunConfig, mesh: Mesh) -> Tree:
    """The batch's shapes with their shardings: [microbatches, rows, ...], rows split over the replicas."""
    replicas = mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1)
    rows = config.batch.sequences
    if config.batch.microbatch_sequences is not None:
        rows = config.batch.microbatch_sequences * replicas
    num_microbatches = config.batch.sequences // rows

    def array(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, activation_spec(("microbatch", "batch"), mesh))
        return jax.ShapeDtypeStruct((num_microbatches, rows, *rest), dtype, sharding=sharding)

    if isinstance(config.model, TransformerModel):
        return {"tokens": array(jnp.int32, config.batch.sequence_length + 1)}
    if isinstance(config.model, LeNetModel):
        return {"images": array(jnp.float32, 1, 28, 28), "labels": array(jnp.int32)}
    width = config.model.input_dim if isinstance(config.model, LinearModel) else config.model.width
    return {"inputs": array(jnp.float32, width), "targets": array(jnp.float32)}
