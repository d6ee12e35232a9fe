"""Compute loss and gradients with the layers sharded over the mesh axis `stage`: a pipeline in one program.

Stage s of S holds layers [s L/S, (s+1) L/S). All stages run the same loops of ticks; `Ticks` says which
microbatch each stage has. Between ticks a stage sends its result to its neighbour. A forward pass saves the
values that its backward pass needs, chosen by `remat`, in a ring of slots, so that the pipeline itself adds
no recomputation. A data replica sums its own gradients; the mean over replicas is taken once per step.

Embedding and head are on every stage, and their gradients are summed over `stage` at the end. Only the first
stage embeds. All stages share the head and the loss: each receives its share of the positions of the last
stage's output, and sends their gradients back. This takes two messages of a residual per microbatch. If
the last stage did it alone, all others would wait: the head of Llama 3 8B has as many parameters as 2.5 of
its 32 layers.

Scopes carry counts to the ledger. `busy_A_of_B`: A of B runs have a microbatch; the others are the bubble.
`taken_A_of_B`: a branch is taken in A of B runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Key

from ..config import PipelineSchedule, Ticks
from ..models import RESIDUAL, Context, Outcome
from ..sharding import AnyMesh, activation_spec, on_each_device, pin
from ._gradients import REPLICAS, mean_over_replicas, without_axes

Tree = Any
AXIS = "stage"
_WHOLE = PartitionSpec()


def scatter_positions(y: Array, mesh: AnyMesh) -> Array:
    """Scatter the last stage's `y` over the stages by position; return [batch, sequence / stages, embed].

    The result is sharded as residuals.

    Args:
        y: [batch, sequence, embed] on each stage; only the last stage's value is used.
        mesh: the abstract mesh inside a `shard_map` over the stages.
    """
    num_stages = mesh.shape[AXIS]

    def local(y: Array) -> Array:
        y = jnp.where(lax.axis_index(AXIS) == num_stages - 1, y, 0)
        return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)

    spec = activation_spec(RESIDUAL, mesh)
    return on_each_device(local, mesh, (spec,), spec)(y)


def gather_positions(x: Array, mesh: AnyMesh) -> Array:
    """Gather all positions [batch, sequence, embed] on every stage; the inverse of `scatter_positions`."""
    spec = activation_spec(RESIDUAL, mesh)
    return on_each_device(lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True), mesh, (spec,), spec)(x)


def own_positions(targets: Array, mesh: AnyMesh) -> Array:
    """Select the positions of `targets` [batch, sequence] that `scatter_positions` sends to this stage."""

    def local(targets: Array) -> Array:
        share = targets.shape[1] // mesh.shape[AXIS]
        return lax.dynamic_slice_in_dim(targets, lax.axis_index(AXIS) * share, share, axis=1)

    spec = activation_spec(RESIDUAL[:2], mesh)
    # Pin first: otherwise the source tokens get this sharding too, and shifting them by one communicates.
    targets = pin(targets, mesh, "batch", "sequence")
    return on_each_device(local, mesh, (spec,), spec)(targets)


@runtime_checkable
class Staged(Protocol):
    """A model whose loss splits into three parts: before the layers, some of the layers, after the layers."""

    def embed(self, parameters: Tree, batch: Tree, context: Context) -> Array:
        """Return the first layer's input."""
        ...

    def apply_layers(
        self, layers: Tree, x: Array, batch: Tree, context: Context, first: Array
    ) -> tuple[tuple[Array, Array], Tree]:
        """Apply `layers`, numbered from `first` in the model.

        Returns:
            Their output and their contribution to the loss; and their figures, a tree of arrays [layers].
        """
        ...

    def targets(self, batch: Tree, context: Context) -> Any:
        """Return the batch's targets: a named tuple with `ids` [rows, positions], and `whole` = None."""
        ...

    def head_loss(self, parameters: Tree, x: Array, targets: Any, context: Context) -> Float[Array, ""]:
        """Return the contribution to the batch's loss of some positions: their `x` and `targets`."""
        ...

    def summarize(self, figures: Any) -> dict[str, Array]:
        """Return the metrics of all layers' figures [microbatches, layers]."""
        ...


class _Totals(NamedTuple):
    """The loss and the layers' figures of a batch."""

    loss: Any  # the sum over microbatches; their mean at the end
    figures: Any  # the layers', a tree of arrays [microbatches, layers]


_TOTALS = _Totals(_WHOLE, PartitionSpec(None, AXIS))  # the stages' layers are concatenated


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A model whose layers are sharded over stages.

    `context_of(key)`: the run's context for a microbatch's key; None for evaluation on held-out data.
    `shardings`: the gradients' shardings, a tree of the same structure.
    """

    model: Staged
    schedule: PipelineSchedule
    context_of: Callable[[Key[Array, ""] | None], Context]
    shardings: Tree

    def scaled_gradients(self, state: Tree, batch: Tree, key: Key[Array, ""]) -> tuple[Array, Outcome, Tree]:
        """Return mean loss, outcome and mean gradient of a batch [microbatches, rows, ...], in float32.

        Under fp16 the backward passes carry the gradient times the state's loss scale.
        """
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else jnp.float32(1)

        def local(parameters: Tree, batch: Tree, key: Array, scale: Array) -> tuple[_Totals, Tree]:
            stage = _Stage(self, parameters, batch, jax.random.wrap_key_data(key))
            totals, gradient = stage.gradients(scale)
            if self.replicas:
                totals, gradient = lax.pmean(totals, REPLICAS), jax.tree.map(lambda g: g[None], gradient)
            return totals, gradient

        parts = jax.tree.map(lambda spec: PartitionSpec(*self.replicas, *spec), self._stage_specs)
        each = self._on_each_stage(local, (_WHOLE, _WHOLE), (_TOTALS, parts))
        totals, gradient = each(state["parameters"], batch, jax.random.key_data(key), scale)
        if self.replicas:
            gradient = mean_over_replicas(gradient, self.shardings)
        if "loss_scale" in state:
            gradient = jax.tree.map(lambda g: g / scale, gradient)
        return totals.loss, Outcome({}, self.model.summarize(totals.figures)), gradient

    def metrics(self, parameters: Tree, batch: Tree) -> dict[str, Array]:
        """Return mean loss and metrics of a held-out batch [microbatches, rows, ...]."""

        def local(parameters: Tree, batch: Tree) -> _Totals:
            totals = _Stage(self, parameters, batch, None).evaluate()
            return lax.pmean(totals, REPLICAS) if self.replicas else totals

        totals = self._on_each_stage(local, (), _TOTALS)(parameters, batch)
        return {"loss": totals.loss, **self.model.summarize(totals.figures)}

    @property
    def mesh(self) -> Mesh:
        """The mesh of the shardings."""
        return jax.tree.leaves(self.shardings)[0].mesh

    @property
    def replicas(self) -> tuple[str, ...]:
        """The axis of the data replicas, if there is more than one."""
        return (REPLICAS,) if self.mesh.shape.get(REPLICAS, 1) > 1 else ()

    @property
    def _stage_specs(self) -> Tree:
        """PartitionSpecs of the parameters over the stages."""

        def spec(sharding: NamedSharding) -> PartitionSpec:
            return PartitionSpec(AXIS) if sharding.spec and sharding.spec[0] == AXIS else _WHOLE

        return jax.tree.map(spec, self.shardings)

    def _on_each_stage(self, local: Any, more_inputs: Any, outputs: Any) -> Any:
        """Wrap `local` of parameters, batch and more to run on each stage of each replica."""
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(self._stage_specs, PartitionSpec(None, *self.replicas), *more_inputs),
            out_specs=outputs,
            axis_names={AXIS, *self.replicas},
            check_vma=False,
        )


class _Carry(NamedTuple):
    """The values carried from tick to tick."""

    x: Array  # input from the previous stage
    d_y: Array  # gradient of the stage's output, from the next stage
    saved: list[Array]  # [slots, ...]: saved by forward passes for backward passes
    totals: _Totals
    gradient: Tree  # sum of the gradients


class _Stage:
    """The work of one stage in a step, traced once for all stages."""

    def __init__(self, pipeline: Pipeline, parameters: Tree, batch: Tree, key: Key[Array, ""] | None) -> None:
        self.pipeline, self.parameters, self.batch, self.key = pipeline, parameters, batch, key
        self.model, self.layers = pipeline.model, parameters["layers"]
        num_stages, num_microbatches = pipeline.mesh.shape[AXIS], jax.tree.leaves(batch)[0].shape[0]
        self.ticks = Ticks(
            schedule=pipeline.schedule, num_stages=num_stages, num_microbatches=num_microbatches
        )
        self.behind = num_stages - 1  # ticks from a microbatch's first stage to its last
        self.is_gpipe = pipeline.schedule == "gpipe"
        self.mesh: AbstractMesh = jax.sharding.get_abstract_mesh()
        self.number = lax.axis_index(AXIS)
        self.is_first, self.is_last = self.number == 0, self.number == self.behind
        self.first_layer = self.number * jax.tree.leaves(self.layers)[0].shape[0]
        # The pullback's structure; and for each of its leaves its index in the layers, or None if saved.
        self.rebuild: Any = None

    def microbatch(self, number: Array) -> tuple[Tree, Context]:
        """Return a microbatch and its context; `number` is clipped to the valid range."""
        number = jnp.clip(number, 0, self.ticks.num_microbatches - 1)
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), self.batch)
        key = None if self.key is None else jax.random.fold_in(self.key, number)
        return part, self.pipeline.context_of(key)

    def exists(self, number: Array) -> Bool[Array, ""]:
        """Return whether a microbatch of this number exists."""
        return (number >= 0) & (number < self.ticks.num_microbatches)

    def scope(self, kind: str, runs: int) -> Any:
        """Return the scope of work that belongs to a microbatch in `num_microbatches` of `runs` runs."""
        return jax.named_scope(f"{kind}_{self.ticks.num_microbatches}_of_{runs}")

    def layers_input(self, x: Array, tick: Array) -> tuple[Array, Tree, Context]:
        """Return the input of the stage's layers in a forward tick, with the microbatch and its context."""
        part, context = self.microbatch(tick - self.number)
        with self.scope("taken", self.ticks.num_stages * self.ticks.num_passes):
            embed = lambda: self.model.embed(self.parameters, part, context)  # noqa: E731
            return lax.cond(self.is_first & self.exists(tick), embed, lambda: x), part, context

    def forward(self, x: Array, tick: Array, totals: _Totals) -> tuple[Array, list[Array], _Totals]:
        """Run a forward pass; return the output, the values saved for the backward pass, and the totals."""
        x, part, context = self.layers_input(x, tick)

        def apply_layers(layers: Tree, x: Array) -> Any:
            return self.model.apply_layers(layers, x, part, context, self.first_layer)

        with self.scope("busy", self.ticks.num_passes):
            (y, more), pullback, figures = jax.vjp(apply_layers, self.layers, x, has_aux=True)
        leaves, structure = jax.tree.flatten(pullback)
        known = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(self.layers))}
        self.rebuild = structure, [known.get(id(leaf)) for leaf in leaves]
        saved = [leaf for leaf in leaves if id(leaf) not in known]
        return y, saved, self.with_figures(totals, tick - self.number, more, figures)

    def with_figures(self, totals: _Totals, number: Array, more: Array, figures: Tree) -> _Totals:
        """Add a microbatch's loss contribution and figures; add nothing if `number` is invalid."""
        exists, place = self.exists(number), jnp.clip(number, 0, self.ticks.num_microbatches - 1)
        loss = totals.loss + jnp.where(exists, more, 0)
        store = lambda all, one: all.at[place].set(jnp.where(exists, one, all[place]))  # noqa: E731
        return _Totals(loss, jax.tree.map(store, totals.figures, figures))

    def head_pass(self, y: Array, tick: Array, carry: _Carry, scale: Array) -> tuple[_Carry, Array]:
        """Add the loss and its gradients to the carry; return it and the last stage's gradient of `y`."""
        number = tick - self.behind

        def run(loss: Array, shared: Tree) -> tuple[Array, Tree, Array]:
            head_loss, x = self.head_loss(y, number)
            more, pullback = jax.vjp(head_loss, _shared(self.parameters), x)
            gradient, d_x = pullback(scale.astype(more.dtype))
            return loss + more, self.added(shared, gradient), gather_positions(d_x, self.mesh)

        arguments = carry.totals.loss, _shared(carry.gradient)
        if self.is_gpipe:
            skip = lambda loss, shared: (loss, shared, jnp.zeros_like(y))  # noqa: E731
            with self.scope("taken", self.ticks.num_passes):
                loss, shared, d_y = lax.cond(self.exists(number), run, skip, *arguments)
        else:
            loss, shared, d_y = run(*arguments)
        totals, gradient = carry.totals._replace(loss=loss), {**carry.gradient, **shared}
        return carry._replace(totals=totals, gradient=gradient), d_y

    def head_loss(self, y: Array, number: Array) -> tuple[Callable[[Tree, Array], Array], Array]:
        """Return the loss of this stage's positions as a function of parameters and `x`, and its `x`."""
        part, context = self.microbatch(number)
        targets = self.model.targets(part, context)
        targets = targets._replace(ids=own_positions(targets.ids, self.mesh), whole=targets.ids)
        head_loss = lambda parameters, x: self.model.head_loss(parameters, x, targets, context)  # noqa: E731
        return head_loss, scatter_positions(y, self.mesh)

    def backward(
        self, saved: list[Array], d_y: Array, scale: Array, tick: Array, gradient: Tree
    ) -> tuple[Array, Tree]:
        """Run a backward pass; return the gradient of the stage's input, and `gradient` plus the new ones."""
        number = tick - (self.behind - self.number)
        exists = self.exists(number)
        structure, places = self.rebuild
        layers, left = jax.tree.leaves(self.layers), iter(saved)
        leaves = [next(left) if place is None else layers[place] for place in places]
        with self.scope("busy", self.ticks.num_passes):
            d_layers, d_x = jax.tree.unflatten(structure, leaves)((d_y, scale))
        d_layers, d_x = jax.tree.map(lambda g: jnp.where(exists, g, 0), (d_layers, d_x))
        part, context = self.microbatch(number)

        def embedding(shared: Tree) -> Tree:
            embed = lambda parameters: self.model.embed(parameters, part, context)  # noqa: E731
            return self.added(shared, jax.vjp(embed, _shared(self.parameters))[1](d_x)[0])

        with self.scope("taken", self.ticks.num_stages * self.ticks.num_passes):
            skip = lambda shared: shared  # noqa: E731
            shared = lax.cond(self.is_first & exists, embedding, skip, _shared(gradient))
        return d_x, {**self.added({"layers": gradient["layers"]}, {"layers": d_layers}), **shared}

    def added(self, total: Tree, more: Tree) -> Tree:
        """Add `more` to `total`, sharded as the parameters are."""
        shardings = {name: self.pipeline.shardings[name] for name in total}
        add = lambda a, b, s: self.pinned(a + b.astype(a.dtype), s)  # noqa: E731
        return jax.tree.map(add, total, more, shardings)

    def pinned(self, x: Array, sharding: NamedSharding) -> Array:
        """Constrain `x` to a parameter's sharding, inside the `shard_map` over the stages."""
        spec = without_axes(sharding.spec, self.mesh.manual_axes)
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def gradients(self, scale: Array) -> tuple[_Totals, Tree]:
        """Run all ticks; return the batch's loss and figures, and `scale` times its mean gradient."""
        ticks, behind = self.ticks, self.behind

        def warmup(carry: _Carry, tick: Array) -> tuple[_Carry, None]:
            y, saved, totals = self.forward(carry.x, tick, carry.totals)
            carry = carry._replace(totals=totals)
            if self.is_gpipe:
                carry, d_y = self.head_pass(y, tick, carry, scale)
                saved = [*saved, d_y]
            return carry._replace(x=self.send_forward(y), saved=self.store(carry.saved, saved, tick)), None

        def steady(carry: _Carry, tick: Array) -> tuple[_Carry, None]:
            y, saved, totals = self.forward(carry.x, tick + behind, carry.totals)
            carry = carry._replace(saved=self.store(carry.saved, saved, tick + behind), totals=totals)
            carry, d_y = self.head_pass(y, tick + behind, carry, scale)
            d_y = jnp.where(self.is_last, d_y, carry.d_y)
            d_x, gradient = self.backward(self.load(carry.saved, tick), d_y, scale, tick, carry.gradient)
            x, d_y = self.send_forward(y), self.send_backward(d_x)
            return carry._replace(x=x, d_y=d_y, gradient=gradient), None

        def cooldown(carry: _Carry, tick: Array) -> tuple[_Carry, None]:
            saved, d_y = self.load(carry.saved, tick), carry.d_y
            if self.is_gpipe:
                *saved, of_head = saved
                d_y = jnp.where(self.is_last, of_head, d_y)
            d_x, gradient = self.backward(saved, d_y, scale, tick, carry.gradient)
            return carry._replace(d_y=self.send_backward(d_x), gradient=gradient), None

        carry, _ = lax.scan(warmup, self.start(), jnp.arange(ticks.num_alone))
        if not self.is_gpipe:
            carry, _ = lax.scan(steady, carry, jnp.arange(ticks.num_microbatches))
        carry, _ = lax.scan(cooldown, carry, jnp.arange(ticks.num_passes - ticks.num_alone, ticks.num_passes))
        mean = lambda x: x / ticks.num_microbatches  # noqa: E731
        shared = lax.psum(_shared(carry.gradient), AXIS)
        return self.mean(carry.totals), jax.tree.map(mean, {**carry.gradient, **shared})

    def start(self) -> _Carry:
        """Return the initial carry: zeros."""
        x, totals = self.zeros()
        saved = jax.eval_shape(lambda x: self.forward(x, jnp.int32(0), totals)[1], x)
        saved = [*saved, x] if self.is_gpipe else saved
        slots = [jnp.zeros((self.ticks.num_kept, *leaf.shape), leaf.dtype) for leaf in saved]
        zeros = lambda p, s: self.pinned(jnp.zeros(p.shape, jnp.float32), s)  # noqa: E731
        return _Carry(x, x, slots, totals, jax.tree.map(zeros, self.parameters, self.pipeline.shardings))

    def zeros(self) -> tuple[Array, _Totals]:
        """Return zeros in the shapes of a message between stages and of the totals."""
        part, context = self.microbatch(jnp.int32(0))

        def once() -> tuple[Array, Tree]:
            x = self.model.embed(self.parameters, part, context)
            return x, self.model.apply_layers(self.layers, x, part, context, self.first_layer)[1]

        x, figures = jax.eval_shape(once)
        number = self.ticks.num_microbatches
        figures = jax.tree.map(lambda one: jnp.zeros((number, *one.shape), one.dtype), figures)
        return jnp.zeros(x.shape, x.dtype), _Totals(jnp.float32(0), figures)

    def store(self, slots: list[Array], saved: list[Array], tick: Array) -> list[Array]:
        """Write the values saved by a forward tick into `slots`."""
        place = tick % self.ticks.num_kept
        return [lax.dynamic_update_index_in_dim(s, k, place, 0) for s, k in zip(slots, saved, strict=True)]

    def load(self, slots: list[Array], tick: Array) -> list[Array]:
        """Read the values for a backward tick, which the same microbatch's forward tick saved."""
        place = (tick - self.behind + 2 * self.number) % self.ticks.num_kept
        return [lax.dynamic_index_in_dim(s, place, keepdims=False) for s in slots]

    def send_forward(self, x: Array) -> Array:
        """Send `x` to the next stage; return the previous stage's."""
        return lax.ppermute(x, AXIS, [(s, s + 1) for s in range(self.behind)])

    def send_backward(self, x: Array) -> Array:
        """Send `x` to the previous stage; return the next stage's."""
        return lax.ppermute(x, AXIS, [(s + 1, s) for s in range(self.behind)])

    def mean(self, totals: _Totals) -> _Totals:
        """Return `totals` with the loss summed over stages and averaged over microbatches."""
        return totals._replace(loss=lax.psum(totals.loss, AXIS) / self.ticks.num_microbatches)

    def evaluate(self) -> _Totals:
        """Run forward ticks only; return the batch's loss and figures."""

        def one(carry: tuple[Array, _Totals], tick: Array) -> tuple[tuple[Array, _Totals], None]:
            x, part, context = self.layers_input(carry[0], tick)
            (y, more), figures = self.model.apply_layers(self.layers, x, part, context, self.first_layer)
            totals = self.with_figures(carry[1], tick - self.number, more, figures)
            number = tick - self.behind
            head_loss, x = self.head_loss(y, number)
            run = lambda: head_loss(self.parameters, x)  # noqa: E731
            more = lax.cond(self.exists(number), run, lambda: jnp.float32(0))
            return (self.send_forward(y), totals._replace(loss=totals.loss + more)), None

        (_, totals), _ = lax.scan(one, self.zeros(), jnp.arange(self.ticks.num_passes))
        return self.mean(totals)


def _shared(tree: Tree) -> Tree:
    """Return all entries but the layers: those that every stage holds."""
    return {name: part for name, part in tree.items() if name != "layers"}
