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
from jaxtyping import Array, Bool, Float, Int, Key

from ..config import PipelineSchedule, Ticks
from ..models import Context, Outcome
from ..sharding import AnyMesh, activation_spec, on_each_device, pin
from ._gradients import REPLICAS, mean_over_replicas, without_axes

AXIS = "stage"
RESIDUAL = ("batch", "residual_sequence", "embed")


def spread(y: Array, mesh: AnyMesh) -> Array:
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

    laid = activation_spec(RESIDUAL, mesh)
    return on_each_device(local, mesh, (laid,), laid)(y)


def collected(x: Array, mesh: AnyMesh) -> Array:
    """Gather all positions [batch, sequence, embed] on every stage; the inverse of `spread`."""
    laid = activation_spec(RESIDUAL, mesh)
    return on_each_device(lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True), mesh, (laid,), laid)(x)


def own(targets: Array, mesh: AnyMesh) -> Array:
    """Select this stage's share of `targets` [batch, sequence]: the positions that `spread` sends to it."""

    def local(targets: Array) -> Array:
        share = targets.shape[1] // mesh.shape[AXIS]
        return lax.dynamic_slice_in_dim(targets, lax.axis_index(AXIS) * share, share, axis=1)

    laid = activation_spec(RESIDUAL[:2], mesh)
    # Pin first: otherwise the source tokens get this sharding too, and shifting them by one communicates.
    targets = pin(targets, mesh, "batch", "sequence")
    return on_each_device(local, mesh, (laid,), laid)(targets)


Tree = Any
_WHOLE = PartitionSpec()


@runtime_checkable
class Staged(Protocol):
    """A model whose loss splits into three parts: before the layers, some of the layers, after the layers."""

    def entered(self, parameters: Tree, batch: Tree, context: Context) -> Array:
        """Return the first layer's input."""
        ...

    def passed(
        self, layers: Tree, x: Array, batch: Tree, context: Context, first: Array
    ) -> tuple[tuple[Array, Array], Tree]:
        """Apply `layers`, numbered from `first` in the model.

        Returns:
            Their output and their contribution to the loss; and their figures, a tree of arrays [layers].
        """
        ...

    def targets(self, batch: Tree, context: Context) -> Int[Array, "rows positions"]:
        """Return the targets with which `judged` compares the last layer's output."""
        ...

    def judged(
        self, parameters: Tree, x: Array, targets: Array, batch: Tree, context: Context
    ) -> Float[Array, ""]:
        """Return the contribution to the batch's loss of some positions: their `x` and `targets`."""
        ...

    def shown(self, figures: Any) -> dict[str, Array]:
        """Return the metrics of all layers' figures [microbatches, layers]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
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

        def local(parameters: Tree, batch: Tree, key: Array, scale: Array) -> tuple[_Seen, Tree]:
            stage = self._stage(parameters, batch, jax.random.wrap_key_data(key))
            seen, total = stage.gradients(scale)
            return self._mean(seen), jax.tree.map(lambda g: g[None], total) if self._replicas else total

        parts = jax.tree.map(lambda spec: PartitionSpec(*self._replicas, *spec), self._split)
        inputs = (self._split, self._rows, _WHOLE, _WHOLE)
        each = self._on_each_stage(local, inputs, (_SEEN, parts))
        seen, gradient = each(state["parameters"], batch, jax.random.key_data(key), scale)
        if self._replicas:
            gradient = mean_over_replicas(gradient, self.shardings)
        if "loss_scale" in state:
            gradient = jax.tree.map(lambda g: g / scale, gradient)
        return seen.value, Outcome({}, self.model.shown(seen.figures)), gradient

    def metrics(self, parameters: Tree, batch: Tree) -> dict[str, Array]:
        """Return mean loss and metrics of a held-out batch [microbatches, rows, ...]."""

        def local(parameters: Tree, batch: Tree) -> _Seen:
            return self._mean(self._stage(parameters, batch, None).seen())

        seen = self._on_each_stage(local, (self._split, self._rows), _SEEN)(parameters, batch)
        return {"loss": seen.value, **self.model.shown(seen.figures)}

    def _stage(self, parameters: Tree, batch: Tree, key: Key[Array, ""] | None) -> _Stage:
        num_microbatches = jax.tree.leaves(batch)[0].shape[0]
        ticks = Ticks(
            schedule=self.schedule, num_stages=self._mesh.shape[AXIS], num_microbatches=num_microbatches
        )
        return _Stage(self, ticks, parameters, batch, key)

    @property
    def _split(self) -> Tree:
        """PartitionSpecs of the parameters over the stages."""
        return jax.tree.map(lambda s: PartitionSpec(AXIS) if _is_split(s) else _WHOLE, self.shardings)

    @property
    def _mesh(self) -> Mesh:
        return jax.tree.leaves(self.shardings)[0].mesh

    @property
    def _replicas(self) -> tuple[str, ...]:
        """The axis of the data replicas, if there is more than one."""
        return (REPLICAS,) if self._mesh.shape.get(REPLICAS, 1) > 1 else ()

    @property
    def _rows(self) -> PartitionSpec:
        """PartitionSpec of a batch [microbatches, rows, ...] over the replicas."""
        return PartitionSpec(None, *self._replicas)

    def _mean(self, seen: _Seen) -> _Seen:
        """Average `seen` over the replicas."""
        return lax.pmean(seen, self._replicas) if self._replicas else seen

    def _on_each_stage(self, local: Any, inputs: Any, outputs: Any) -> Any:
        manual = {AXIS, *self._replicas}
        return jax.shard_map(
            local, mesh=self._mesh, in_specs=inputs, out_specs=outputs, axis_names=manual, check_vma=False
        )


class _Seen(NamedTuple):
    """The loss and the layers' figures of a batch."""

    value: Any  # sum of the losses; their mean at the end
    figures: Any  # the layers', a tree of arrays [microbatches, layers]


_SEEN = _Seen(_WHOLE, PartitionSpec(None, AXIS))  # the stages' layers are concatenated


class _Carry(NamedTuple):
    """The values carried from tick to tick."""

    x: Array  # input from the previous stage
    gradient: Array  # of the stage's output, from the next stage
    kept: list[Array]  # [slots, ...]: saved by forward passes for backward passes
    seen: _Seen
    total: Tree  # sum of the gradients


class _Stage:
    """The work of one stage in a step, traced once for all stages."""

    def __init__(
        self, pipeline: Pipeline, ticks: Ticks, parameters: Tree, batch: Tree, key: Key[Array, ""] | None
    ) -> None:
        self.model, self.ticks, self.batch, self.key = pipeline.model, ticks, batch, key
        self.context_of, self.shardings = pipeline.context_of, pipeline.shardings
        self.mesh: AbstractMesh = jax.sharding.get_abstract_mesh()
        self.number = lax.axis_index(AXIS)
        self.is_first, self.is_last = self.number == 0, self.number == self.ticks.num_stages - 1
        self.is_gpipe = self.ticks.schedule == "gpipe"
        self.parameters = parameters
        self.layers = parameters["layers"]
        num_layers = jax.tree.leaves(self.layers)[0].shape[0]
        self.first_layer = self.number * num_layers
        # The pullback's structure; and for each of its leaves its index in the layers, or None if saved.
        self.rebuild: Any = None

    def microbatch(self, number: Array) -> tuple[Tree, Context]:
        """Return a microbatch and its context; `number` is clipped to the valid range."""
        number = jnp.clip(number, 0, self.ticks.num_microbatches - 1)
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), self.batch)
        key = None if self.key is None else jax.random.fold_in(self.key, number)
        return part, self.context_of(key)

    def is_there(self, number: Array) -> Bool[Array, ""]:
        """Return whether a microbatch of this number exists."""
        return (number >= 0) & (number < self.ticks.num_microbatches)

    def scope(self, kind: str, runs: int) -> Any:
        """Return the scope of work that belongs to a microbatch in `num_microbatches` of `runs` runs."""
        return jax.named_scope(f"{kind}_{self.ticks.num_microbatches}_of_{runs}")

    def enter(self, x: Array, tick: Array) -> tuple[Array, Tree, Context]:
        """Return the input of the stage's layers in a forward tick, with the microbatch and its context."""
        part, context = self.microbatch(tick - self.number)
        with self.scope("taken", self.ticks.num_stages * self.ticks.num_passes):
            entered = lambda: self.model.entered(self.parameters, part, context)  # noqa: E731
            begins = self.is_first & self.is_there(tick)
            return lax.cond(begins, entered, lambda: x), part, context

    def forward(self, x: Array, tick: Array, seen: _Seen) -> tuple[Array, list[Array], _Seen]:
        """Run a forward pass; return the output, the values saved for the backward pass, and `seen`."""
        x, part, context = self.enter(x, tick)
        passed = lambda layers, x: self.model.passed(layers, x, part, context, self.first_layer)  # noqa: E731
        with self.scope("busy", self.ticks.num_passes):
            (y, more), pullback, figures = jax.vjp(passed, self.layers, x, has_aux=True)
        leaves, structure = jax.tree.flatten(pullback)
        known = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(self.layers))}
        self.rebuild = structure, [known.get(id(leaf)) for leaf in leaves]
        kept = [leaf for leaf in leaves if id(leaf) not in known]
        return y, kept, self.with_figures(seen, tick - self.number, more, figures)

    def with_figures(self, seen: _Seen, number: Array, more: Array, figures: Tree) -> _Seen:
        """Add a microbatch's loss contribution and figures to `seen`; add nothing if `number` is invalid."""
        is_there, place = self.is_there(number), jnp.clip(number, 0, self.ticks.num_microbatches - 1)
        value = seen.value + jnp.where(is_there, more, 0)
        put = lambda all, one: all.at[place].set(jnp.where(is_there, one, all[place]))  # noqa: E731
        return _Seen(value, jax.tree.map(put, seen.figures, figures))

    def judge(self, y: Array, tick: Array, carry: _Carry, scale: Array) -> tuple[_Carry, Array]:
        """Add the loss and its gradients to the carry; return it and the last stage's gradient of `y`."""
        number = tick - (self.ticks.num_stages - 1)

        def there(value: Array, shared: Tree) -> tuple[Array, Tree, Array]:
            judged, x = self.judged(y, number)
            more, pullback = jax.vjp(judged, _shared(self.parameters), x)
            gradient, d_x = pullback(scale.astype(more.dtype))
            return value + more, self.added(shared, gradient), collected(d_x, self.mesh)

        arguments = carry.seen.value, _shared(carry.total)
        if self.is_gpipe:
            nothing = lambda value, shared: (value, shared, jnp.zeros_like(y))  # noqa: E731
            with self.scope("taken", self.ticks.num_passes):
                value, shared, d_y = lax.cond(self.is_there(number), there, nothing, *arguments)
        else:
            value, shared, d_y = there(*arguments)
        return carry._replace(seen=carry.seen._replace(value=value), total={**carry.total, **shared}), d_y

    def judged(self, y: Array, number: Array) -> tuple[Callable[[Tree, Array], Array], Array]:
        """Return the loss contribution of this stage's positions as a function, and its share of `y`.

        The function's arguments are the parameters and the share.
        """
        part, context = self.microbatch(number)
        targets = own(self.model.targets(part, context), self.mesh)
        judged = lambda parameters, x: self.model.judged(parameters, x, targets, part, context)  # noqa: E731
        return judged, spread(y, self.mesh)

    def backward(
        self, kept: list[Array], d_y: Array, scale: Array, tick: Array, total: Tree
    ) -> tuple[Array, Tree]:
        """Run a backward pass; return the gradient of the stage's input, and `total` plus new gradients."""
        number = tick - (self.ticks.num_stages - 1 - self.number)
        is_there = self.is_there(number)
        structure, places = self.rebuild
        layers, left = jax.tree.leaves(self.layers), iter(kept)
        leaves = [next(left) if place is None else layers[place] for place in places]
        with self.scope("busy", self.ticks.num_passes):
            d_layers, d_x = jax.tree.unflatten(structure, leaves)((d_y, scale))
        d_layers, d_x = jax.tree.map(lambda g: jnp.where(is_there, g, 0), (d_layers, d_x))
        part, context = self.microbatch(number)

        def first(shared: Tree) -> Tree:
            entered = lambda parameters: self.model.entered(parameters, part, context)  # noqa: E731
            return self.added(shared, jax.vjp(entered, _shared(self.parameters))[1](d_x)[0])

        with self.scope("taken", self.ticks.num_stages * self.ticks.num_passes):
            shared = lax.cond(self.is_first & is_there, first, lambda shared: shared, _shared(total))
        return d_x, {**self.added({"layers": total["layers"]}, {"layers": d_layers}), **shared}

    def added(self, total: Tree, more: Tree) -> Tree:
        """Add `more` to `total`, sharded as the parameters are."""
        laid = {name: self.shardings[name] for name in total}
        return jax.tree.map(
            lambda a, b, s: lax.with_sharding_constraint(a + b.astype(a.dtype), self.inside(s)),
            total,
            more,
            laid,
        )

    def inside(self, sharding: NamedSharding) -> NamedSharding:
        """Return a parameter's sharding inside the `shard_map` over the stages."""
        spec = without_axes(sharding.spec, self.mesh.manual_axes)
        return NamedSharding(self.mesh, spec)

    def gradients(self, scale: Array) -> tuple[_Seen, Tree]:
        """Run all ticks; return the batch's loss and figures, and `scale` times its mean gradient."""
        ticks, is_gpipe = self.ticks, self.is_gpipe
        behind = ticks.num_stages - 1

        def filling(carry: _Carry, tick: Array) -> tuple[_Carry, None]:
            y, kept, seen = self.forward(carry.x, tick, carry.seen)
            carry = carry._replace(seen=seen)
            if is_gpipe:
                carry, d_y = self.judge(y, tick, carry, scale)
                kept = [*kept, d_y]
            return carry._replace(x=self.up(y), kept=self.put(carry.kept, kept, tick)), None

        def both(carry: _Carry, tick: Array) -> tuple[_Carry, None]:
            y, kept, seen = self.forward(carry.x, tick + behind, carry.seen)
            carry = carry._replace(kept=self.put(carry.kept, kept, tick + behind), seen=seen)
            carry, d_y = self.judge(y, tick + behind, carry, scale)
            d_y = jnp.where(self.is_last, d_y, carry.gradient)
            d_x, total = self.backward(self.got(carry.kept, tick), d_y, scale, tick, carry.total)
            return carry._replace(x=self.up(y), gradient=self.down(d_x), total=total), None

        def draining(carry: _Carry, tick: Array) -> tuple[_Carry, None]:
            kept, d_y = self.got(carry.kept, tick), carry.gradient
            if is_gpipe:
                *kept, judged = kept
                d_y = jnp.where(self.is_last, judged, d_y)
            d_x, total = self.backward(kept, d_y, scale, tick, carry.total)
            return carry._replace(gradient=self.down(d_x), total=total), None

        carry = self.start()
        carry, _ = lax.scan(filling, carry, jnp.arange(ticks.num_alone))
        if not is_gpipe:
            carry, _ = lax.scan(both, carry, jnp.arange(ticks.num_microbatches))
        carry, _ = lax.scan(draining, carry, jnp.arange(ticks.num_passes - ticks.num_alone, ticks.num_passes))
        mean = lambda x: x / ticks.num_microbatches  # noqa: E731
        shared = lax.psum(_shared(carry.total), AXIS)
        return self.mean(carry.seen), jax.tree.map(mean, {**carry.total, **shared})

    def start(self) -> _Carry:
        """Return the initial carry: zeros."""
        x, seen = self.nothing()
        kept = jax.eval_shape(lambda x: self.forward(x, jnp.int32(0), seen)[1], x)
        kept = [*kept, x] if self.is_gpipe else kept
        slots = [jnp.zeros((self.ticks.num_kept, *leaf.shape), leaf.dtype) for leaf in kept]
        total = jax.tree.map(
            lambda p, s: lax.with_sharding_constraint(jnp.zeros(p.shape, jnp.float32), self.inside(s)),
            self.parameters,
            self.shardings,
        )
        return _Carry(x, x, slots, seen, total)

    def nothing(self) -> tuple[Array, _Seen]:
        """Return zeros in the shapes of a message between stages and of `_Seen`."""
        part, context = self.microbatch(jnp.int32(0))

        def once() -> tuple[Array, Tree]:
            x = self.model.entered(self.parameters, part, context)
            return x, self.model.passed(self.layers, x, part, context, self.first_layer)[1]

        x, figures = jax.eval_shape(once)
        number = self.ticks.num_microbatches
        figures = jax.tree.map(lambda one: jnp.zeros((number, *one.shape), one.dtype), figures)
        return jnp.zeros(x.shape, x.dtype), _Seen(jnp.float32(0), figures)

    def put(self, slots: list[Array], kept: list[Array], tick: Array) -> list[Array]:
        """Write the values saved by a forward tick into `slots`."""
        place = tick % self.ticks.num_kept
        return [lax.dynamic_update_index_in_dim(s, k, place, 0) for s, k in zip(slots, kept, strict=True)]

    def got(self, slots: list[Array], tick: Array) -> list[Array]:
        """Read the values for a backward tick, which the same microbatch's forward tick saved."""
        place = (tick - (self.ticks.num_stages - 1) + 2 * self.number) % self.ticks.num_kept
        return [lax.dynamic_index_in_dim(s, place, keepdims=False) for s in slots]

    def up(self, x: Array) -> Array:
        """Send `x` to the next stage; return the previous stage's."""
        return lax.ppermute(x, AXIS, [(s, s + 1) for s in range(self.ticks.num_stages - 1)])

    def down(self, x: Array) -> Array:
        """Send `x` to the previous stage; return the next stage's."""
        return lax.ppermute(x, AXIS, [(s + 1, s) for s in range(self.ticks.num_stages - 1)])

    def mean(self, seen: _Seen) -> _Seen:
        """Return `seen` with the loss summed over stages and averaged over microbatches."""
        return seen._replace(value=lax.psum(seen.value, AXIS) / self.ticks.num_microbatches)

    def seen(self) -> _Seen:
        """Run forward ticks only; return the batch's loss and figures."""
        ticks = self.ticks

        def one(carry: tuple[Array, _Seen], tick: Array) -> tuple[tuple[Array, _Seen], None]:
            x, part, context = self.enter(carry[0], tick)
            (y, more), figures = self.model.passed(self.layers, x, part, context, self.first_layer)
            seen = self.with_figures(carry[1], tick - self.number, more, figures)
            number = tick - (ticks.num_stages - 1)
            judged, x = self.judged(y, number)
            there = lambda: judged(self.parameters, x)  # noqa: E731
            value = lax.cond(self.is_there(number), there, lambda: jnp.float32(0))
            return (self.up(y), seen._replace(value=seen.value + value)), None

        (_, seen), _ = lax.scan(one, self.nothing(), jnp.arange(ticks.num_passes))
        return self.mean(seen)


def _is_split(sharding: NamedSharding) -> bool:
    return bool(sharding.spec) and sharding.spec[0] == AXIS


def _shared(tree: Tree) -> Tree:
    """Return all entries but the layers: those that every stage holds."""
    return {name: part for name, part in tree.items() if name != "layers"}
