"""Compute loss and gradients with the layers sharded over the mesh axis `stage`: a pipeline in one program.

A stage holds one or several chunks of layers, which lie apart in the model. All stages run the same loops of
ticks; `Ticks` says which chunk and microbatch each stage has. Between ticks a stage sends its result to its
neighbour, and the last stage to the first where there are several chunks. Along `data` and `context` each
device sums the gradients of its own tokens; the mean over both is taken once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Key

from meshwright.config import PipelineSchedule, RunConfig, Ticks, num_stacked_layers, padded_layers
from meshwright.sharding import replica_axes
from meshwright.trainer.models import Model, Outcome, Parameter, is_parameter
from meshwright.trainer.step import axes_beside, mean_over_parts, only_axes, rows_spec, spec_in_step

from ._stage import AXIS, ContextOf, Stage, Staged, Totals

Tree = Any
_WHOLE = PartitionSpec()
_TOTALS = Totals(_WHOLE, PartitionSpec(None, None, AXIS))  # of each chunk the stages' layers in order


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A model whose layers are sharded over stages.

    `num_layers`: of the model; the parameters have `num_padded_layers`.
    `num_chunks`: of layers on each stage. With several, the layers' parameters are [chunks, layers / chunks,
    ...] and their second dim is sharded over the stages.
    `context_of(key)`: the run's context for a microbatch's key; None for evaluation on held-out data.
    `shardings`: the gradients' shardings, a tree of the parameters' structure.
    `axes`: those along which each device sums the gradients of its own tokens.
    `specs`: the parameters' PartitionSpecs over the stages and `axes`, a tree of the same structure.
    `formats`: those in which gradients are summed, a tree of the same structure.
    """

    model: Staged
    schedule: PipelineSchedule
    num_chunks: int
    num_layers: int
    num_padded_layers: int
    context_of: ContextOf
    shardings: Tree
    axes: tuple[str, ...]
    specs: Tree
    formats: Tree

    def scaled_gradients(self, state: Tree, batch: Tree, key: Key[Array, ""]) -> tuple[Array, Outcome, Tree]:
        """Return mean loss, outcome and mean gradient of a batch [microbatches, rows, ...], in float32.

        The state's parameters may be in the compute format. Under fp16 the backward passes carry the gradient
        times the state's loss scale.
        """
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else jnp.float32(1)

        def local(parameters: Tree, batch: Tree, key: Array, scale: Array) -> tuple[Totals, Tree]:
            stage = self._stage(parameters, batch, jax.random.wrap_key_data(key))
            totals, gradient = stage.gradients(scale)
            totals = lax.pmean(totals, self.axes) if self.axes else totals
            return totals, jax.tree.map(lambda g: g[None], gradient)

        # Those on every stage are summed over the stages too.
        over = jax.tree.map(lambda spec: axes_beside(spec, (*self.axes, AXIS)), self.specs)
        parts = jax.tree.map(lambda spec, its: PartitionSpec(its or None, *spec), self.specs, over)
        each = self._on_each_stage(local, (_WHOLE, _WHOLE), (_TOTALS, parts))
        totals, gradient = each(state["parameters"], batch, jax.random.key_data(key), scale)
        gradient = mean_over_parts(gradient, self.shardings, self.axes, over)
        if "loss_scale" in state:
            gradient = jax.tree.map(lambda g: g / scale, gradient)
        return totals.loss, Outcome({}, self._summary(totals)), gradient

    def metrics(self, parameters: Tree, batch: Tree) -> dict[str, Array]:
        """Return mean loss and metrics of a held-out batch [microbatches, rows, ...]."""

        def local(parameters: Tree, batch: Tree) -> Totals:
            totals = self._stage(parameters, batch, None).evaluate()
            return lax.pmean(totals, self.axes) if self.axes else totals

        totals = self._on_each_stage(local, (), _TOTALS)(parameters, batch)
        return {"loss": totals.loss, **self._summary(totals)}

    def _stage(self, parameters: Tree, batch: Tree, key: Key[Array, ""] | None) -> Stage:
        """Return the work of the stage that this code runs on."""
        ticks = Ticks(
            schedule=self.schedule,
            num_stages=self.mesh.shape[AXIS],
            num_microbatches=jax.tree.leaves(batch)[0].shape[0],
            num_chunks=self.num_chunks,
            num_layers=self.num_layers,
            num_padded_layers=self.num_padded_layers,
        )
        how = (self.context_of, self.shardings, self.formats)
        return Stage(self.model, ticks, *how, parameters, batch, key)

    def _summary(self, totals: Totals) -> dict[str, Array]:
        figures = jax.tree.map(lambda x: x.reshape(x.shape[0], -1)[:, : self.num_layers], totals.figures)
        return self.model.summarize(figures)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the shardings."""
        return jax.tree.leaves(self.shardings)[0].mesh

    def _on_each_stage(self, local: Any, more_inputs: Any, outputs: Any) -> Any:
        """Wrap `local` of parameters, batch and more to run on each stage of each part of the tokens."""
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(self.specs, rows_spec(self.axes), *more_inputs),
            out_specs=outputs,
            axis_names={AXIS, *self.axes},
            check_vma=False,
        )


def pipeline_of(
    config: RunConfig, model: Model, used: Tree, context_of: ContextOf, shardings: Tree, formats: Tree
) -> Pipeline:
    """Return the pipeline of a run over several stages.

    `used`: the declarations of the parameters as a step uses them.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    axes = replica_axes(mesh, config.zero1)

    def spec(declared: Parameter) -> PartitionSpec:
        return only_axes(spec_in_step(declared, mesh, config.zero1, in_step=True), (AXIS, *axes))

    specs = jax.tree.map(spec, used, is_leaf=is_parameter)
    num_layers = num_stacked_layers(config)
    assert isinstance(model, Staged), f"check_layout refuses stages of a {config.model.kind} model"
    assert num_layers is not None, f"a {config.model.kind} model has no stacked layers"
    held = num_layers, padded_layers(config, mesh.shape[AXIS])
    how = (context_of, shardings, axes, specs, formats)
    return Pipeline(model, config.pipeline, config.pipeline_chunks, *held, *how)
