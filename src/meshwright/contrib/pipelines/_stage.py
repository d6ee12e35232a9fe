"""Run one stage of a pipeline: its passes through chunks of layers, and its share of the loss, in every tick.

A forward pass saves the values that its backward pass needs, chosen by `remat`, in a slot
(`_pipeline_schedule`), so that the pipeline itself adds no recomputation. Gradients are added to their sums
layer by layer, where they are made.

A tick with both passes goes through the layers once: the forward pass upwards and, beside it, the backward
pass downwards. Neither needs the other, so messages of the one can run beside products of the other. The
backward pass reads its slot first; otherwise XLA would copy all slots before the forward pass writes.

Stages share the rows of the embedding: each finds what it has, and the sum over the stages is the input of
the first (`look_up`). They share the loss too, but by positions: each has the whole head, receives its share
of the positions of the last stage's output, and sends their gradients back. This takes two messages of a
residual per microbatch. If the last stage did it alone, all others would wait: the head of Llama 3 8B has as
many parameters as 2.5 of its 32 layers. The head's gradient is summed over the stages at the end; a tied
table is a head. No tick has a branch: a table's gradient that is carried through one is copied in every tick.

The scope `busy_A_of_B` tells the ledger that A of B runs have a microbatch, and layers that are no padding;
the others are the bubble.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key

from meshwright.config import ACTIVATION_RULES, FIRST_LAYERS, Ticks
from meshwright.sharding import AnyMesh, activation_spec, axis_size, on_each_device, pin
from meshwright.trainer.models import RESIDUAL, Context
from meshwright.trainer.models.loss import LEFT_OUT, with_positions
from meshwright.trainer.step import without_axes

from ._first_layers import FirstLayers
from ._pipeline_schedule import Schedule, Segment, Table, Work

Tree = Any
ContextOf = Callable[[Key[Array, ""] | None], Context]
"""Maps a microbatch's key to the run's context; None is for evaluation on held-out data."""
AXIS = "stage"


def held_as(category: str) -> AbstractContextManager[Any]:
    """Name the memory category of what is computed in the block: no phase of a pipeline's tick shows it.

    `category`: one of the ledger's. Only the names in the compiled program change.
    """
    return jax.named_scope(f"held_as_{category}")


def scatter_positions(y: Array, mesh: AnyMesh) -> Array:
    """Scatter the last stage's `y` over the stages by position; return [batch, sequence / stages, embed].

    The result is sharded as residuals. Where the stages do not divide a device's positions, the last ones
    receive zeros to fill their share.

    Args:
        y: [batch, sequence, embed] on each stage; only the last stage's value is used.
        mesh: the abstract mesh inside a `shard_map` over the stages.
    """
    num_stages = mesh.shape[AXIS]

    def local(y: Array) -> Array:
        y = with_positions(jnp.where(lax.axis_index(AXIS) == num_stages - 1, y, 0), num_stages, 0)
        return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)

    spec = activation_spec(RESIDUAL, mesh)
    return on_each_device(local, mesh, (spec,), spec)(y)


def gather_positions(x: Array, length: int, mesh: AnyMesh) -> Array:
    """Gather [batch, length, embed] on every stage, without what fills shares: undo `scatter_positions`."""
    spec = activation_spec(RESIDUAL, mesh)
    held = length // _num_parts(mesh)

    def local(x: Array) -> Array:
        return lax.slice_in_dim(lax.all_gather(x, AXIS, axis=1, tiled=True), 0, held, axis=1)

    return on_each_device(local, mesh, (spec,), spec)(x)


def own_positions(targets: Array, mesh: AnyMesh) -> Array:
    """Select the positions of `targets` [batch, sequence] that `scatter_positions` sends to this stage.

    Positions that fill a share are `LEFT_OUT`.
    """

    def local(targets: Array) -> Array:
        targets = with_positions(targets, mesh.shape[AXIS], LEFT_OUT)
        share = targets.shape[1] // mesh.shape[AXIS]
        return lax.dynamic_slice_in_dim(targets, lax.axis_index(AXIS) * share, share, axis=1)

    spec = activation_spec(RESIDUAL[:2], mesh)
    # Pin first: otherwise the source tokens get this sharding too, and shifting them by one communicates.
    targets = pin(targets, mesh, "batch", "sequence")
    return on_each_device(local, mesh, (spec,), spec)(targets)


def _num_parts(mesh: AnyMesh) -> int:
    """Return over how many devices of a stage the positions of a residual are split."""
    return math.prod(axis_size(mesh, axis) for axis in ACTIVATION_RULES[RESIDUAL[1]])


@runtime_checkable
class Staged(Protocol):
    """A model whose loss splits into three parts: before the layers, groups of layers, after the layers."""

    def group_size(self, context: Context) -> int:
        """Return the number of layers in a group; all groups are alike."""
        ...

    def layers_of_group(self, layers: Tree, context: Context) -> list[Tree]:
        """Return the parameters of each layer of a group, which are stacked by the layers' parts."""
        ...

    def embed(self, parameters: Tree, batch: Tree, context: Context) -> Array:
        """Return the first layer's input.

        If the context has `sums` of "embedding", this table's gradient is added to theirs (`look_up`).
        """
        ...

    def for_layers(self, batch: Tree, context: Context) -> Tree:
        """Return the arrays of a batch that all layers use; None if there are none."""
        ...

    def first_layers(self, parameters: Tree, x: Array, used: Tree, context: Context) -> Array:
        """Apply the layers before those that stages share, if there are parameters of such."""
        ...

    def apply_group(
        self, layers: list[Tree], x: Array, used: Tree, context: Context, first: Array
    ) -> tuple[tuple[Array, Array], Tree]:
        """Apply a group of layers, numbered from `first` in the model.

        Args:
            layers: the parameters of each layer.
            used: the result of `for_layers`.

        Returns:
            Their output and their contribution to the loss; and their figures, a tree of arrays [layers].
        """
        ...

    def targets(self, batch: Tree, context: Context) -> Any:
        """Return the batch's targets: a named tuple of `ids` [rows, positions], `gaps` and `whole` (None)."""
        ...

    def head_loss(self, parameters: Tree, x: Array, targets: Any, context: Context) -> Float[Array, ""]:
        """Return the contribution to the batch's loss of some positions: their `x` and `targets`."""
        ...

    def summarize(self, figures: Any) -> dict[str, Array]:
        """Return the metrics of all layers' figures [microbatches, layers]."""
        ...


class Totals(NamedTuple):
    """The loss and the layers' figures of a batch."""

    loss: Any  # the sum over microbatches; their mean at the end
    figures: Any  # of layers that have some, a tree of arrays [microbatches, chunks, layers]


class _Pass(NamedTuple):
    """A stage's pass in one tick (`Table`), with its inputs."""

    exists: Bool[Array, ""]
    chunk: Int[Array, ""]
    microbatch: Int[Array, ""]
    slot: Int[Array, ""]


class _Carry(NamedTuple):
    """The values carried from tick to tick."""

    entries: Any  # of the first layers (`FirstLayers`); None without them
    x: Array  # input of the next forward pass, from the previous stage
    embedded: Array  # the next microbatch that the first stage begins with
    d_y: Array  # gradient of the output of the next backward pass, from the next stage
    outputs: Array  # [1, or under gpipe microbatches + 1; ...]: of the last stage, whose loss comes later
    d_x: Array  # gradient of the input of the last backward pass, for the embedding
    slots: list[Array]  # [slots, groups, ...]: saved by forward passes for backward passes
    totals: Totals
    gradient: Tree  # sum of the gradients


class _Saved(NamedTuple):
    """How a pullback is put together from the values of a slot.

    `places`: for each leaf of the pullback where it comes from: ("layers", n), ("used", n), ("saved", n), or
    ("value", itself).
    """

    structure: Any
    places: list[tuple[str, Any]]
    shapes: list[jax.ShapeDtypeStruct]


class Stage:
    """The work of one stage in a step, traced once for all stages.

    Args:
        model: its layers are sharded over the stages.
        ticks: the schedule of all stages.
        context_of: makes the context of a microbatch.
        shardings: of the gradients, a tree of the parameters' structure.
        formats: those in which gradients are summed, a tree of the same structure.
        parameters: those of this stage, perhaps in the compute format.
        batch: [microbatches, rows, ...].
        key: the batch's; None for evaluation.
    """

    def __init__(
        self,
        model: Staged,
        ticks: Ticks,
        context_of: ContextOf,
        shardings: Tree,
        formats: Tree,
        parameters: Tree,
        batch: Tree,
        key: Key[Array, ""] | None,
    ) -> None:
        self.model, self.ticks, self.context_of, self.shardings = model, ticks, context_of, shardings
        self.formats, self.parameters, self.batch, self.key = formats, parameters, batch, key
        self.layers, self.num_chunks = parameters["layers"], ticks.num_chunks
        self.behind = ticks.num_stages - 1
        self.is_gpipe = ticks.schedule == "gpipe"
        self.mesh: AbstractMesh = jax.sharding.get_abstract_mesh()
        self.number = lax.axis_index(AXIS)
        self.is_first, self.is_last = self.number == 0, self.number == self.behind
        self.chunk_size = ticks.num_padded_layers // (ticks.num_stages * self.num_chunks)
        self.group_size = self.model.group_size(context_of(None))
        self.num_groups = self.chunk_size // self.group_size
        self.is_padded = ticks.num_padded_layers > ticks.num_layers
        # With one group of layers, a tick's backward pass has read its slot before the forward pass writes.
        self.schedule = Schedule(self.ticks, reads_first=self.num_groups == 1)
        self.first_layers = FirstLayers(self, AXIS) if FIRST_LAYERS in parameters else None
        self.saved: _Saved

    # What belongs to a tick

    def pass_of(self, table: Table, tick: Array, stage: Array | int) -> _Pass:
        """Return the pass of a stage in a tick; one that does not exist if the tick is not in the table."""
        num_ticks = len(table.exists)
        inside = (tick >= 0) & (tick < num_ticks)
        place = jnp.clip(tick, 0, num_ticks - 1)

        def read(column: np.ndarray) -> Array:
            narrow = jnp.asarray(column, bool if column.dtype == bool else jnp.int32)
            return lax.dynamic_slice(narrow, (place, stage), (1, 1))[0, 0]

        found = _Pass(*(read(getattr(table, name)) for name in _Pass._fields))
        return found._replace(exists=found.exists & inside)

    def microbatch(self, number: Array) -> tuple[Tree, Context]:
        """Return a microbatch and its context."""
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), self.batch)
        key = None if self.key is None else jax.random.fold_in(self.key, number)
        return part, self.context_of(key)

    def busy(self, table: Table) -> Any:
        """Return the scope of passes, of which some have no microbatch or go through padding."""
        needed, runs = self.ticks.num_needed, len(table.exists)
        if self.is_padded:
            needed, runs = needed * self.ticks.num_layers, runs * self.ticks.num_padded_layers
        return jax.named_scope(f"busy_{needed}_of_{runs}")

    # Layers, one group at a time

    def parts_of(self, tree: Tree, chunk: Array, group: Array) -> Tree:
        """Return one group's part of a tree of stacked layers, its layers as the first dim."""

        def part(x: Array) -> Array:
            size = x.shape[int(self.num_chunks > 1)] // self.num_groups
            start = group * size
            if self.num_chunks == 1:
                return lax.dynamic_slice_in_dim(x, start, size)
            rest = x.shape[2:]
            return lax.dynamic_slice(x, (chunk, start, *(0,) * len(rest)), (1, size, *rest))[0]

        return jax.tree.map(part, tree)

    def used_by(self, its: _Pass, group: Array) -> Tree:
        """Return what a group of layers uses besides its parameters and its input."""
        part, context = self.microbatch(its.microbatch)
        first = (its.chunk * self.ticks.num_stages + self.number) * self.chunk_size
        first = first + group * self.group_size
        is_layer = first < self.ticks.num_layers if self.is_padded else None
        return self.model.for_layers(part, context), context.dropout_key, first, is_layer

    def apply_group(self, layers: list[Tree], x: Array, used: Tree) -> Any:
        """Apply a group of layers; return output and contribution to the loss, and the layers' figures.

        Layers that are padding hand on their input.
        """
        of_batch, key, first, is_layer = used
        (y, more), figures = self.model.apply_group(layers, x, of_batch, self.context_of(key), first)
        if is_layer is not None:  # no branch: its gradient would keep the weights beside the activations
            y, more = jnp.where(is_layer, y, x), jnp.where(is_layer, more, 0)
        return (y, more), figures

    def layers_of(self, its: _Pass, group: Array) -> list[Tree]:
        """Return the parameters of each layer of a group."""
        leaves, structure = jax.tree.flatten(self.layers)
        parts: list[Array] = []
        for number, leaf in enumerate(leaves):
            # A place of its own for each, or XLA would copy all matrices of a layer at once.
            chunk, at, _ = lax.optimization_barrier((its.chunk, group, jnp.int32(number)))
            parts.append(self.widened(self.parts_of(leaf, chunk, at)))
        return self.model.layers_of_group(jax.tree.unflatten(structure, parts), self.context_of(None))

    def widened(self, tree: Tree) -> Tree:
        """Return parameters in the format that their gradients are to have, here float32 or their own."""
        if not self.context_of(None).wide_gradients:
            return tree
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def forward(
        self, x: Array, its: _Pass, group: Array, totals: Totals
    ) -> tuple[Array, list[Array], Totals]:
        """Run a group's forward pass; return the output, the values to save, and the totals."""
        layers, used = self.layers_of(its, group), self.used_by(its, group)
        with self.busy(self.schedule.forward):
            (y, more), pullback, figures = jax.vjp(
                lambda layers, x: self.apply_group(layers, x, used), layers, x, has_aux=True
            )
        leaves, structure = jax.tree.flatten(pullback)
        known = {id(x): (name, n) for name, tree in (("layers", layers), ("used", used))
                 for n, x in enumerate(jax.tree.leaves(tree))}  # fmt: skip
        places: list[tuple[str, Any]] = []
        saved: list[Array] = []
        for leaf in leaves:
            if id(leaf) in known:
                places.append(known[id(leaf)])
            elif not isinstance(leaf, Tracer):
                places.append(("value", leaf))
            else:
                places.append(("saved", len(saved)))
                saved.append(leaf)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in saved]
        self.saved = _Saved(structure, places, shapes)
        return y, saved, self.with_figures(totals, its, group, more, figures)

    def with_figures(self, totals: Totals, its: _Pass, group: Array, more: Array, figures: Tree) -> Totals:
        """Add a group's loss contribution and figures; add nothing if the pass does not exist."""
        loss = totals.loss + jnp.where(its.exists, more, 0)

        def store(all: Array, one: Array) -> Array:
            at = its.microbatch, its.chunk, group * one.size
            one = jnp.where(its.exists, one[None, None], lax.dynamic_slice(all, at, (1, 1, one.size)))
            return lax.dynamic_update_slice(all, one, at)

        return Totals(loss, jax.tree.map(store, totals.figures, figures))

    def backward(
        self, saved: list[Array], d_y: Array, scale: Array, its: _Pass, group: Array, gradient: Tree
    ) -> tuple[Array, Tree]:
        """Run a group's backward pass; return its input's gradient, and `gradient` with the group's added."""
        layers, used = self.layers_of(its, group), self.used_by(its, group)
        sources = {"layers": jax.tree.leaves(layers), "used": jax.tree.leaves(used), "saved": saved}
        structure, places, _ = self.saved
        leaves = [what if name == "value" else sources[name][what] for name, what in places]
        d_y, scale = jnp.where(its.exists, d_y, 0), jnp.where(its.exists, scale, 0)
        with self.busy(self.schedule.backward):
            d_layers, d_x = jax.tree.unflatten(structure, leaves)((d_y, scale))

        def added(total: Array, *each: Array) -> Array:
            for place, more in enumerate(each):
                layer = group * len(each) + place
                at = (its.chunk, layer) if self.num_chunks > 1 else layer
                total = total.at[at].add(more.astype(total.dtype), mode="promise_in_bounds")
            return total

        gradient = {
            part: jax.tree.map(added, total, *(layer[part] for layer in d_layers if part in layer))
            for part, total in gradient.items()
        }
        return d_x, self.pinned(gradient, self.shardings["layers"])

    def through_layers(self, work: Work, carry: _Carry, up: _Pass, down: _Pass, scale: Array) -> _Carry:
        """Run a tick's passes through all groups of a chunk: forward upwards, backward downwards.

        Of the carry, `x` and `d_y` become the outputs of the passes.
        """

        def one(carry: _Carry, number: Array) -> tuple[_Carry, None]:
            last, saved = self.num_groups - 1 - number, list[Array]()
            if work.backward:
                saved = [_loaded(slot, down.slot, last) for slot in carry.slots]
            if work.forward and work.backward:
                saved, slots = lax.optimization_barrier((saved, carry.slots))
                carry = carry._replace(slots=slots)
            if work.forward:
                y, kept, totals = self.forward(carry.x, up, number, carry.totals)
                slots = [
                    _stored(slot, value, up.slot, number)
                    for slot, value in zip(carry.slots, kept, strict=True)
                ]
                carry = carry._replace(x=y, slots=slots, totals=totals)
            if work.backward:
                layers = carry.gradient["layers"]
                d_x, layers = self.backward(saved, carry.d_y, scale, down, last, layers)
                carry = carry._replace(d_y=d_x, gradient={**carry.gradient, "layers": layers})
            return carry, None

        if self.num_groups == 1:
            return one(carry, jnp.int32(0))[0]
        return lax.scan(one, carry, jnp.arange(self.num_groups))[0]

    # Embedding and head

    def embedded(self, number: Array) -> Array:
        """Return a microbatch as the first stage begins with it.

        All stages take part, for each has some rows of the embedding.
        """
        with held_as("forward_temporaries"):
            return self.model.embed(self.parameters, *self.microbatch(number))

    def entered(self, entries: Any, number: Array) -> Array:
        """Return a microbatch as the first of the layers that stages share begins with it."""
        return (
            self.embedded(number) if self.first_layers is None else self.first_layers.entered(entries, number)
        )

    def begun(self, carry: _Carry, tick: Array) -> _Carry:
        """Begin a microbatch on the first stage, and embed the next one, whose messages overlap this tick."""
        number = self.pass_of(self.schedule.forward, tick, 0).microbatch
        with held_as("collective_staging"):
            x = jnp.where(self.is_first, carry.embedded, carry.x)
        following = jnp.minimum(number + 1, self.ticks.num_microbatches - 1)
        return carry._replace(x=x, embedded=self.entered(carry.entries, following))

    def embedding_gradient(self, carry: _Carry, tick: Array) -> _Carry:
        """Add the embedding's gradient of the backward pass that the first stage did in the tick before."""
        its = self.pass_of(self.schedule.backward, tick - 1, 0)
        d_x = jnp.where(self.is_first & its.exists, carry.d_x, 0)
        if self.first_layers is None:
            return carry._replace(gradient=self.with_embedding(carry.gradient, its.microbatch, d_x))
        # With several chunks this tick may have had no microbatch's first layer.
        exists = its.exists & (its.chunk == 0)
        entries = self.first_layers.returned(carry.entries, its.microbatch, d_x, exists)
        return carry._replace(entries=entries)

    def with_embedding(self, gradient: Tree, number: Array, d_x: Array) -> Tree:
        """Return `gradient` with the embedding's of a microbatch added; `d_x` is a part of its output's."""
        part, context = self.microbatch(number)
        others = self.widened(_shared(self.parameters))
        table = {"embedding": others.pop("embedding")}

        def embed(others: Tree, sums: Tree) -> Array:
            return self.model.embed({**others, **table}, part, replace(context, sums=sums))

        more, sums = jax.vjp(embed, others, {"embedding": gradient["embedding"]})[1](d_x)
        return self.added({**gradient, **sums}, more)

    def head_pass(self, carry: _Carry, tick: Array, scale: Array) -> _Carry:
        """Add the loss of the last stage's output for a backward tick, and start its gradient there."""
        its = self.pass_of(self.schedule.backward, tick, self.behind)
        place = its.microbatch if self.is_gpipe else jnp.int32(0)
        y = lax.dynamic_index_in_dim(carry.outputs, place, keepdims=False)
        head_loss, x = self.head_loss(y, its.microbatch)
        more, pullback = jax.vjp(head_loss, self.widened(_shared(self.parameters)), x)
        gradient, d_x = pullback(scale.astype(more.dtype))
        d_y = jnp.where(self.is_last, gather_positions(d_x, y.shape[1], self.mesh), carry.d_y)
        totals = carry.totals._replace(loss=carry.totals.loss + more)
        return carry._replace(totals=totals, d_y=d_y, gradient=self.added(carry.gradient, gradient))

    def head_loss(self, y: Array, number: Array) -> tuple[Callable[[Tree, Array], Array], Array]:
        """Return the loss of this stage's positions as a function of parameters and `x`, and its `x`."""
        part, context = self.microbatch(number)
        targets = self.model.targets(part, context)
        fills = targets.ids.shape[1] // _num_parts(self.mesh) % self.ticks.num_stages > 0
        own = own_positions(targets.ids, self.mesh)
        targets = targets._replace(ids=own, gaps=targets.gaps or fills, whole=targets.ids)
        head_loss = lambda parameters, x: self.model.head_loss(parameters, x, targets, context)  # noqa: E731
        return head_loss, scatter_positions(y, self.mesh)

    def added(self, total: Tree, more: Tree) -> Tree:
        """Add the shared parameters' gradient `more` to `total`, sharded as the parameters are."""
        changed = {name: total[name] for name in more}
        with held_as("gradients"):
            changed = jax.tree.map(lambda a, b: a + b.astype(a.dtype), changed, more)
        shared = {**_shared(total), **changed}
        return {**total, **self.pinned(shared, _shared(self.shardings))}

    def pinned(self, tree: Tree, shardings: Tree) -> Tree:
        """Constrain arrays to parameters' shardings, inside the `shard_map` over the stages."""

        def pin(x: Array, sharding: NamedSharding) -> Array:
            spec = without_axes(sharding.spec, self.mesh.manual_axes)
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(pin, tree, shardings)

    # Ticks

    def gradients(self, scale: Array) -> tuple[Totals, Tree]:
        """Run all ticks; return the batch's loss and figures, and `scale` times its mean gradient.

        Parameters that every stage holds have this stage's part of their gradient: the caller sums the parts.
        """
        carry, forward, backward = self.start(), 0, 0
        for segment in self.schedule.segments:
            carry = self.run(segment, carry, (forward, backward), scale)
            forward, backward = (
                ticks + segment.repeats * more
                for ticks, more in zip((forward, backward), segment.num_passes, strict=True)
            )
        carry = self.embedding_gradient(carry, jnp.int32(backward))
        gradient = carry.gradient
        if self.first_layers is not None:
            gradient = self.first_layers.gradient(carry.entries, gradient)
        mean = lambda x: x / self.ticks.num_microbatches  # noqa: E731
        return self.mean(carry.totals), jax.tree.map(mean, gradient)

    def run(self, segment: Segment, carry: _Carry, begin: tuple[int, int], scale: Array) -> _Carry:
        """Run the ticks of a segment, which begins with these forward and backward ticks."""

        def once(carry: _Carry, repeat: Array) -> tuple[_Carry, None]:
            up, down = (first + repeat * more for first, more in zip(begin, segment.num_passes, strict=True))
            for work, count in segment.parts:

                def tick(
                    ticks: _Carry, i: Array, work: Work = work, up: Array = up, down: Array = down
                ) -> Any:
                    return self.tick(work, ticks, up + i, down + i, scale), None

                carry, _ = lax.scan(tick, carry, jnp.arange(count))
                up, down = up + work.forward * count, down + work.backward * count
            return carry, None

        if segment.repeats == 1:
            return once(carry, jnp.int32(0))[0]
        return lax.scan(once, carry, jnp.arange(segment.repeats))[0]

    def tick(self, work: Work, carry: _Carry, forward: Array, backward: Array, scale: Array) -> _Carry:
        """Run the work of a tick, and exchange its results with the neighbours."""
        up = self.pass_of(self.schedule.forward, forward, self.number)
        down = self.pass_of(self.schedule.backward, backward, self.number)
        if work.embeds_back:
            carry = self.embedding_gradient(carry, backward)
        if work.judges:
            carry = self.head_pass(carry, backward, scale)
        if work.embeds:
            carry = self.begun(carry, forward)
        carry = self.through_layers(work, carry, up, down, scale)
        if work.forward:
            with held_as("saved_activations"):
                place = self.output_place(forward)
                outputs = lax.dynamic_update_index_in_dim(carry.outputs, carry.x, place, 0)
            carry = carry._replace(x=self.send(carry.x, 1), outputs=outputs)
        if work.backward:
            carry = carry._replace(d_x=carry.d_y, d_y=self.send(carry.d_y, -1))
        return carry

    def output_place(self, tick: Array) -> Array:
        """Return where the output of a forward tick waits for its loss; under `gpipe` until all are done."""
        if not self.is_gpipe:
            return jnp.int32(0)
        last = self.pass_of(self.schedule.forward, tick, self.behind)
        is_judged = last.exists & (last.chunk == self.num_chunks - 1)
        return jnp.where(is_judged, last.microbatch, self.ticks.num_microbatches)

    def start(self) -> _Carry:
        """Return the initial carry: zeros."""
        x, totals = self.zeros()
        none = _Pass(jnp.bool_(False), *(jnp.int32(0),) * 3)
        jax.eval_shape(lambda x: self.forward(x, none, jnp.int32(0), totals)[0], x)
        in_slots = self.schedule.num_slots, self.num_groups
        slots: list[Array] = []
        for number, leaf in enumerate(self.saved.shapes):
            # A zero of its own for each, or XLA would copy those of one shape from one another.
            zero, _ = lax.optimization_barrier((jnp.zeros((), leaf.dtype), jnp.int32(number)))
            slots.append(jnp.broadcast_to(zero, (*in_slots, *leaf.shape)))
        waiting = self.ticks.num_microbatches + 1 if self.is_gpipe else 1
        outputs = jnp.zeros((waiting, *x.shape), x.dtype)
        names = [name for name in self.parameters if name != FIRST_LAYERS]  # theirs comes after the ticks
        parameters, formats, shardings = (
            {name: tree[name] for name in names} for tree in (self.parameters, self.formats, self.shardings)
        )
        gradient = self.pinned(
            jax.tree.map(lambda p, f: jnp.zeros(p.shape, f), parameters, formats), shardings
        )
        entries = None if self.first_layers is None else self.first_layers.entries()
        embedded = self.entered(entries, jnp.int32(0))
        return _Carry(entries, x, embedded, x, outputs, x, slots, totals, gradient)

    def zeros(self) -> tuple[Array, Totals]:
        """Return zeros in the shapes of a message between stages and of the totals."""
        none = _Pass(jnp.bool_(False), *(jnp.int32(0),) * 3)

        def once() -> tuple[Array, Tree]:
            x = self.model.embed(self.parameters, *self.microbatch(jnp.int32(0)))
            layers, used = self.layers_of(none, jnp.int32(0)), self.used_by(none, jnp.int32(0))
            return x, self.apply_group(layers, x, used)[1]

        x, figures = jax.eval_shape(once)
        shape = self.ticks.num_microbatches, self.num_chunks
        figures = jax.tree.map(lambda x: jnp.zeros((*shape, self.num_groups * x.size), x.dtype), figures)
        return jnp.zeros(x.shape, x.dtype), Totals(jnp.float32(0), figures)

    def send(self, x: Array, way: int) -> Array:
        """Send `x` to the stage that is `way` stages ahead; return the array that this stage receives.

        With several chunks the last stage's neighbour is the first, which has the next chunk.
        """
        stages = range(self.ticks.num_stages)
        pairs = [(s, (s + way) % len(stages)) for s in stages if self.num_chunks > 1 or s + way in stages]
        with held_as("collective_staging"):
            return lax.ppermute(x, AXIS, pairs)

    def mean(self, totals: Totals) -> Totals:
        """Return `totals` with the loss summed over stages and averaged over microbatches."""
        return totals._replace(loss=lax.psum(totals.loss, AXIS) / self.ticks.num_microbatches)

    def evaluate(self) -> Totals:
        """Run forward ticks only; return the batch's loss and figures."""
        entries = None if self.first_layers is None else self.first_layers.entries()

        def one(carry: tuple[Array, Totals], tick: Array) -> tuple[tuple[Array, Totals], None]:
            x, totals = carry
            first, here, last = (
                self.pass_of(self.schedule.forward, tick, stage) for stage in (0, self.number, self.behind)
            )
            embeds = first.exists & (first.chunk == 0)
            x = lax.cond(
                embeds,
                lambda: jnp.where(self.is_first, self.entered(entries, first.microbatch), x),
                lambda: x,
            )

            def group(carry: tuple[Array, Totals], number: Array) -> tuple[tuple[Array, Totals], None]:
                layers, used = self.layers_of(here, number), self.used_by(here, number)
                (y, more), figures = self.apply_group(layers, carry[0], used)
                return (y, self.with_figures(carry[1], here, number, more, figures)), None

            (y, totals), _ = lax.scan(group, (x, totals), jnp.arange(self.num_groups))

            def judged() -> Array:
                head_loss, x = self.head_loss(y, last.microbatch)
                return head_loss(self.parameters, x)

            judges = last.exists & (last.chunk == self.num_chunks - 1)
            more = lax.cond(judges, judged, lambda: jnp.float32(0))
            return (self.send(y, 1), totals._replace(loss=totals.loss + more)), None

        (_, totals), _ = lax.scan(one, self.zeros(), jnp.arange(self.ticks.num_passes))
        return self.mean(totals)


def _shared(tree: Tree) -> Tree:
    """Return all entries but layers: those of embedding, head and last norm, which every stage holds."""
    return {name: part for name, part in tree.items() if name not in ("layers", FIRST_LAYERS)}


def _stored(slots: Array, value: Array, slot: Array, group: Array) -> Array:
    """Return `slots` [slots, groups, ...] with a group's value in one slot."""
    with held_as("saved_activations"):
        return lax.dynamic_update_slice(slots, value[None, None], (slot, group, *(0,) * value.ndim))


def _loaded(slots: Array, slot: Array, group: Array) -> Array:
    """Return a group's value in one slot."""
    rest = slots.shape[2:]
    with held_as("saved_activations"):
        return lax.dynamic_slice(slots, (slot, group, *(0,) * len(rest)), (1, 1, *rest))[0, 0]
