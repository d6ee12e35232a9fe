"""Build the train step of a config on a mesh.

The state is a dict: `parameters` (float32), `model_state` (what the model keeps in addition to parameters),
`optimizer` (moments in float32), `key` (the run's random key), `step`, and under fp16 `loss_scale`. The batch
has a leading dim of microbatches; gradients are summed over it in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from ..config import RunConfig
from ..models import Context, Model, Outcome, initial_parameters, model_of
from ..sharding import mesh_here
from ._gradients import (
    FORMATS,
    gradients_by_replica,
    gradients_of,
    initial_scale,
    next_scale,
    scale_metrics,
    scaled_gradients,
)
from ._optimizer import optimizer_of, schedule_of
from ._pipeline import Pipeline, Staged
from ._state import abstract_batch, abstract_state, to_device, to_host, whole_over_replicas

Tree = Any
_Gradients = Callable[[Tree, Tree], tuple[Array, Outcome, Tree]]  # arguments: state and batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """A train step on a mesh, and everything needed to lower or to run it.

    `step(state, batch) -> (state, metrics)` is jitted and donates the state. If loss or gradient is not
    finite, only `step` and `loss_scale` change, and the metric `applied` is 0.
    `init(seed) -> state` creates the state with its shardings.
    `evaluate(parameters, model_state, batch) -> metrics` evaluates held-out data.
    `inspect(state, batch) -> tree` counts non-finite numbers in batch, parameters, loss and gradients.
    `state` and `batch` are the abstract arguments of `step`: trees of `jax.ShapeDtypeStruct` with shardings.
    """

    step: Callable[[Tree, Tree], tuple[Tree, dict[str, Array]]]
    init: Callable[[Array], Tree]
    evaluate: Callable[[Tree, Tree, Tree], dict[str, Array]]
    inspect: Callable[[Tree, Tree], Tree]
    state: Tree
    batch: Tree


def _platform(mesh: Mesh) -> str:
    platform: str = mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


def build_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """Build the train step of `config` on `mesh`. The config must be resolved and checked on that layout."""
    model = model_of(config.model)
    declared = model.parameters()
    optimizer = optimizer_of(config, declared)
    init, context_of = _init_of(config, model, optimizer), _contexts(config, mesh)
    state = abstract_state(init, declared, mesh, zero1=config.zero1, on_host=_moments_on_host(config))
    batch = abstract_batch(config, mesh)
    state_shardings, batch_shardings = (jax.tree.map(lambda s: s.sharding, tree) for tree in (state, batch))

    laid = state_shardings["parameters"]
    pipeline: Pipeline | None = None
    if mesh.shape.get("stage", 1) > 1:
        assert isinstance(model, Staged), f"check_layout refuses stages of a {config.model.kind} model"
        pipeline = Pipeline(model=model, schedule=config.pipeline, context_of=context_of, shardings=laid)

    def loss(
        parameters: Tree, model_state: Tree, microbatch: Tree, key: Key[Array, ""] | None
    ) -> tuple[Array, Outcome]:
        return model.loss(parameters, model_state, microbatch, context_of(key))

    def used(parameters: Tree) -> Tree:
        if not config.zero1:
            return parameters
        return whole_over_replicas(parameters, declared, mesh, FORMATS[config.precision])

    def evaluate(parameters: Tree, model_state: Tree, batch: Tree) -> dict[str, Array]:
        parameters = used(parameters)
        if pipeline is not None:
            return pipeline.metrics(parameters, batch)

        def one(microbatch: Tree) -> dict[str, Array]:
            value, outcome = loss(parameters, model_state, microbatch, None)
            return {"loss": value, **outcome.metrics}

        return jax.tree.map(jnp.mean, jax.lax.map(one, batch))

    def gradients(state: Tree, batch: Tree) -> tuple[Array, Outcome, Tree]:
        # A model with state computes statistics over the whole batch, so it must see all replicas at once.
        sums = gradients_of if jax.tree.leaves(model.state()) else gradients_by_replica
        held = {**state, "parameters": used(state["parameters"])}
        if pipeline is not None:
            return pipeline.scaled_gradients(held, batch, _key_of(state))
        return scaled_gradients(sums, loss, laid, held, batch, _key_of(state))

    replicated, arguments = NamedSharding(mesh, PartitionSpec()), (state_shardings, batch_shardings)
    judged = (laid, state_shardings["model_state"], batch_shardings)
    return TrainStep(
        step=jax.jit(
            _step(config, optimizer, gradients, laid),
            donate_argnums=0,
            in_shardings=arguments,
            out_shardings=(state_shardings, replicated),
        ),
        init=jax.jit(init, out_shardings=state_shardings),
        evaluate=jax.jit(evaluate, in_shardings=judged, out_shardings=replicated),
        inspect=jax.jit(_inspect(gradients), in_shardings=arguments, out_shardings=replicated),
        state=state,
        batch=batch,
    )


def _moments_on_host(config: RunConfig) -> bool:
    return config.offload in ("optimizer", "both")


def _init_of(config: RunConfig, model: Model, optimizer: Any) -> Callable[[Array], Tree]:
    """Return the function, not jitted, that creates a state from a seed."""

    def init(seed: Array) -> Tree:
        root = jax.random.key(seed)
        parameters = initial_parameters(model.parameters(), jax.random.fold_in(root, 0))
        return {
            "parameters": parameters,
            "model_state": initial_parameters(model.state(), root),
            "optimizer": optimizer.init(parameters),
            "key": jax.random.key_data(jax.random.fold_in(root, 1)),
            "step": jnp.int32(0),
            **initial_scale(config.precision),
        }

    return init


def _contexts(config: RunConfig, mesh: Mesh) -> Callable[[Key[Array, ""] | None], Context]:
    """Return the function that makes a model's `Context` from a microbatch's key.

    The context's mesh is the mesh that the calling code sees. A key of None means evaluation.
    """

    def context_of(key: Key[Array, ""] | None) -> Context:
        return Context(
            mesh=mesh_here(mesh),
            dtype=FORMATS[config.precision],
            platform=_platform(mesh),
            remat=config.remat,
            zero1=config.zero1,
            offloads=config.offload in ("activations", "both"),
            fp8=config.precision == "fp8",
            dropout_key=key,
            training=key is not None,
        )

    return context_of


def _step(config: RunConfig, optimizer: Any, gradients: _Gradients, shardings: Tree) -> Any:
    """Return the step, not jitted: gradients over the microbatches, then one update if they are finite."""
    rate, on_host = schedule_of(config), _moments_on_host(config)

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, Array]]:
        before = state["parameters"]
        held = to_device(state["optimizer"]) if on_host else state["optimizer"]
        value, outcome, gradient = gradients(state, batch)
        with jax.named_scope("optimizer"):
            gradient = jax.lax.with_sharding_constraint(gradient, shardings)
            norm = optax.tree.norm(gradient)
            applied = jnp.isfinite(value) & jnp.isfinite(norm)
            learning_rate = jnp.asarray(rate(state["step"]), jnp.float32)
            updates, moments = optimizer.update(gradient, held, before)
            updates = jax.tree.map(lambda u: learning_rate * u, updates)
            new = {
                "parameters": optax.apply_updates(before, updates),
                "optimizer": moments,
                "model_state": outcome.state,
            }
            old = {"parameters": before, "optimizer": held, "model_state": state["model_state"]}
            new = jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, old)
            if on_host:
                new["optimizer"] = to_host(new["optimizer"])
        metrics = {
            "loss": value,
            "gradient_norm": norm,
            "learning_rate": learning_rate,
            "applied": applied.astype(jnp.int32),
            **scale_metrics(state),
            **outcome.metrics,
        }
        new |= next_scale(state, applied)
        return {**state, **new, "step": state["step"] + 1}, metrics

    return step


def _inspect(gradients: _Gradients) -> Any:
    """Return the function, not jitted, that counts non-finite numbers: the causes of a step not applied."""

    def count(array: Array) -> Array:
        return jnp.sum(~jnp.isfinite(array))  # integers are always finite

    def inspect(state: Tree, batch: Tree) -> Tree:
        value, _, gradient = gradients(state, batch)
        found = {"batch": batch, "parameters": state["parameters"], "loss": value, "gradients": gradient}
        return jax.tree.map(count, found)

    return inspect


def _key_of(state: Tree) -> Key[Array, ""]:
    """Return the random key of the state's step."""
    return jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
