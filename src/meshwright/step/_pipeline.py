"""Compute loss and gradients with the layers split over the mesh axis `stage`.

Positions of a microbatch split over the stages of a pipeline, for what comes after the layers.

The last stage alone has what the layers gave. Were it alone to judge it, all would wait for its head: the
head of Llama 3 8B has as many parameters as two and a half of its 32 layers. Each stage is sent its share of
every device's positions, and sends their gradients back: two messages of a residual for each microbatch.

Loss and gradients of a whole batch with the layers split over `stage`: a pipeline in the one program.

Stage s of S holds layers [s L/S, (s+1) L/S). All stages run the same loops of ticks (`Ticks` says which
microbatch is where); between ticks what a stage made goes to its neighbour. A forward pass keeps what its
backward pass needs, as `remat` says, in a ring of slots, so that nothing is computed twice. Embedding and
head are on every stage: the first alone embeds, and each judges its share of the positions. Their gradients
are summed over `stage` at the end. A data replica sums up its own gradients; the mean over replicas is taken
once a step.

Scopes tell those who count: `busy_A_of_B`, that A of B runs are a microbatch's and the others the bubble's;
`taken_A_of_B`, that a branch is taken in A of B runs.
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
    """This stage's positions of what the last stage holds, [batch, sequence / stages, embed], a residual.

    Args:
        y: [batch, sequence, embed] on each stage; only the last one's counts.
        mesh: as it is inside a `shard_map` over the stages.
    """
    num_stages = mesh.shape[AXIS]

    def local(y: Array) -> Array:
        y = jnp.where(lax.axis_index(AXIS) == num_stages - 1, y, 0)
        return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)

    laid = activation_spec(RESIDUAL, mesh)
    return on_each_device(local, mesh, (laid,), laid)(y)


def collected(x: Array, mesh: AnyMesh) -> Array:
    """The opposite: all positions [batch, sequence, embed], on every stage."""
    laid = activation_spec(RESIDUAL, mesh)
    return on_each_device(lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True), mesh, (laid,), laid)(x)


def own(targets: Array, mesh: AnyMesh) -> Array:
    """Of targets [batch, sequence], which every stage has, those of the positions that `spread` gives it."""

    def local(targets: Array) -> Array:
        share = targets.shape[1] // mesh.shape[AXIS]
        return lax.dynamic_slice_in_dim(targets, lax.axis_index(AXIS) * share, share, axis=1)

    laid = activation_spec(RESIDUAL[:2], mesh)
    # Pinned first: else the tokens they come from are split so too, and whoever shifts those by one sends.
    targets = pin(targets, mesh, "batch", "sequence")
    return on_each_device(local, mesh, (laid,), laid)(targets)


Tree = Any
_WHOLE = PartitionSpec()


@runtime_checkable
class Staged(Protocol):
    """A model whose loss is made of three parts: before the layers, some of the layers, after them."""

    def entered(self, parameters: Tree, batch: Tree, context: Context) -> Array:
        """What the first layer is given."""
        ...

    def passed(
        self, layers: Tree, x: Array, batch: Tree, context: Context, first: Array
    ) -> tuple[tuple[Array, Array], Tree]:
        """`x` after `layers`, of which the first is number `first` of the model; what they add to the loss;
        and their figures, a tree of arrays [layers]."""
        ...

    def targets(self, batch: Tree, context: Context) -> Int[Array, "rows positions"]:
        """What `judged` sets what the last layer gave beside."""
        ...

    def judged(
        self, parameters: Tree, x: Array, targets: Array, batch: Tree, context: Context
    ) -> Float[Array, ""]:
        """What some positions of the batch, `x` with their `targets`, add to its loss."""
        ...

    def shown(self, figures: Any) -> dict[str, Array]:
        """What is shown of all layers' figures [microbatches, layers]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A model laid over stages.

    `context_of(key)`: the run's context for a microbatch's key, None where held-out data is judged.
    `shardings`: of the gradients, a tree like theirs.
    """

    model: Staged
    schedule: PipelineSchedule
    context_of: Callable[[Key[Array, ""] | None], Context]
    shardings: Tree

    def scaled_gradients(self, state: Tree, batch: Tree, key: Key[Array, ""]) -> tuple[Array, Outcome, Tree]:
        """Mean loss, outcome and mean gradient of a batch [microbatches, rows, ...], in float32.

        Under fp16 what goes back through the stages is the state's loss scale times the gradient.
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
        """Mean loss and figures of a held-out batch [microbatches, rows, ...]."""

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
        """How parameters are split over the stages."""
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
        """How a batch [microbatches, rows, ...] is split over the replicas."""
        return PartitionSpec(None, *self._replicas)

    def _mean(self, seen: _Seen) -> _Seen:
        """Of what the replicas saw."""
        return lax.pmean(seen, self._replicas) if self._replicas else seen

    def _on_each_stage(self, local: Any, inputs: Any, outputs: Any) -> Any:
        manual = {AXIS, *self._replicas}
        return jax.shard_map(
            local, mesh=self._mesh, in_specs=inputs, out_specs=outputs, axis_names=manual, check_vma=False
        )


class _Seen(NamedTuple):
    """What is known of a batch when it has passed."""

    value: Any  # sum, in the end mean, of the losses
    figures: Any  # of the layers, a tree of arrays [microbatches, layers]


_SEEN = _Seen(_WHOLE, PartitionSpec(None, AXIS))  # the stages' layers one behind the other


class _Carry(NamedTuple):
    """What goes from tick to tick."""

    x: Array  # from the stage before
    gradient: Array  # of what the stage gave, from the stage behind
    kept: list[Array]  # [slots, ...]: what backward passes need of forward passes
    seen: _Seen
    total: Tree  # sum of the gradients


class _Stage:
    """One stage's part in the step, traced once for all stages."""

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
        self.rebuild: Any = None  # the structure of a pullback, and which of its leaves are not kept

    def microbatch(self, number: Array) -> tuple[Tree, Context]:
        """A microbatch and its context; the nearest there is where there is no such number."""
        number = jnp.clip(number, 0, self.ticks.num_microbatches - 1)
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), self.batch)
        key = None if self.key is None else jax.random.fold_in(self.key, number)
        return part, self.context_of(key)

    def is_there(self, number: Array) -> Bool[Array, ""]:
        """Whether there is a microbatch of this number."""
        return (number >= 0) & (number < self.ticks.num_microbatches)

    def scope(self, kind: str, runs: int) -> Any:
        """The scope of work that is a microbatch's in as many of `runs` as there are microbatches."""
        return jax.named_scope(f"{kind}_{self.ticks.num_microbatches}_of_{runs}")

    def enter(self, x: Array, tick: Array) -> tuple[Array, Tree, Context]:
        """What the stage's layers are given in a forward tick."""
        part, context = self.microbatch(tick - self.number)
        with self.scope("taken", self.ticks.num_stages * self.ticks.num_passes):
            entered = lambda: self.model.entered(self.parameters, part, context)  # noqa: E731
            begins = self.is_first & self.is_there(tick)
            return lax.cond(begins, entered, lambda: x), part, context

    def forward(self, x: Array, tick: Array, seen: _Seen) -> tuple[Array, list[Array], _Seen]:
        """What the stage's layers make of a microbatch, what the backward pass will need, what is seen."""
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
        """`seen` with what a microbatch's layers add to the loss, and their figures; for none, `seen`."""
        is_there, place = self.is_there(number), jnp.clip(number, 0, self.ticks.num_microbatches - 1)
        value = seen.value + jnp.where(is_there, more, 0)
        put = lambda all, one: all.at[place].set(jnp.where(is_there, one, all[place]))  # noqa: E731
        return _Seen(value, jax.tree.map(put, seen.figures, figures))

    def judge(self, y: Array, tick: Array, carry: _Carry, scale: Array) -> tuple[_Carry, Array]:
        """The loss and its gradients added, and on the last stage the gradient of `y`."""
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
        """What this stage's share of a microbatch adds to the loss, a function of parameters and of the share
        of `y`; and that share."""
        part, context = self.microbatch(number)
        targets = own(self.model.targets(part, context), self.mesh)
        judged = lambda parameters, x: self.model.judged(parameters, x, targets, part, context)  # noqa: E731
        return judged, spread(y, self.mesh)

    def backward(
        self, kept: list[Array], d_y: Array, scale: Array, tick: Array, total: Tree
    ) -> tuple[Array, Tree]:
        """The gradient of what the stage was given, and the sum of gradients with this microbatch's."""
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
        """The sum, laid as the parameters are."""
        laid = {name: self.shardings[name] for name in total}
        return jax.tree.map(
            lambda a, b, s: lax.with_sharding_constraint(a + b.astype(a.dtype), self.inside(s)),
            total,
            more,
            laid,
        )

    def inside(self, sharding: NamedSharding) -> NamedSharding:
        """A parameter's sharding as it is within a stage."""
        spec = without_axes(sharding.spec, self.mesh.manual_axes)
        return NamedSharding(self.mesh, spec)

    def gradients(self, scale: Array) -> tuple[_Seen, Tree]:
        """What is seen of the batch, and `scale` times its mean gradient."""
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
        """Zeros of every kind."""
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
        """What goes between stages, and what is seen, before there is anything."""
        part, context = self.microbatch(jnp.int32(0))

        def once() -> tuple[Array, Tree]:
            x = self.model.entered(self.parameters, part, context)
            return x, self.model.passed(self.layers, x, part, context, self.first_layer)[1]

        x, figures = jax.eval_shape(once)
        number = self.ticks.num_microbatches
        figures = jax.tree.map(lambda one: jnp.zeros((number, *one.shape), one.dtype), figures)
        return jnp.zeros(x.shape, x.dtype), _Seen(jnp.float32(0), figures)

    def put(self, slots: list[Array], kept: list[Array], tick: Array) -> list[Array]:
        """`slots` with what a forward tick keeps."""
        place = tick % self.ticks.num_kept
        return [lax.dynamic_update_index_in_dim(s, k, place, 0) for s, k in zip(slots, kept, strict=True)]

    def got(self, slots: list[Array], tick: Array) -> list[Array]:
        """What was kept for a backward tick, by the forward tick that had the same microbatch."""
        place = (tick - (self.ticks.num_stages - 1) + 2 * self.number) % self.ticks.num_kept
        return [lax.dynamic_index_in_dim(s, place, keepdims=False) for s in slots]

    def up(self, x: Array) -> Array:
        """What the stage before gave."""
        return lax.ppermute(x, AXIS, [(s, s + 1) for s in range(self.ticks.num_stages - 1)])

    def down(self, x: Array) -> Array:
        """What the stage behind gave."""
        return lax.ppermute(x, AXIS, [(s + 1, s) for s in range(self.ticks.num_stages - 1)])

    def mean(self, seen: _Seen) -> _Seen:
        """`seen` with the mean loss of all stages' and microbatches' parts."""
        return seen._replace(value=lax.psum(seen.value, AXIS) / self.ticks.num_microbatches)

    def seen(self) -> _Seen:
        """What is seen of the batch when it only goes forward."""
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
    """All but the layers: what every stage has."""
    return {name: part for name, part in tree.items() if name != "layers"}
