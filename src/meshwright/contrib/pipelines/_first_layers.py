"""Run the layers before those that stages share: dense layers, before all others have experts.

The layers of a pipeline are alike, and these are not. They are few, and no stage should wait for them. So
each stage runs them for its share of the microbatches: stage s for s, s + S, s + 2 S, ... It does so before
the first tick, and their outputs wait until the first stage begins with them (`entered`). A microbatch's
gradient with respect to its output takes its place (`returned`). After the last tick each stage runs the
backward pass of its microbatches, which computes the layers again, from the tokens on.

A step then has M / S rounds of these layers on every stage, and no bubble but in the last round. The price is
room for M / S residuals on each stage. Over `stage` two residuals of a microbatch are sent, as many as for
the rows of an embedding that the stages share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.config import FIRST_LAYERS
from meshwright.sharding import activation_spec, on_each_device
from meshwright.trainer.models import RESIDUAL

if TYPE_CHECKING:
    from ._stage import Stage

Tree = Any


class FirstLayers:
    """The first layers of a stage's share of the microbatches.

    Args:
        stage: the work of this stage.
        axis: the mesh axis of the stages.
    """

    def __init__(self, stage: Stage, axis: str) -> None:
        self.stage, self.axis = stage, axis
        self.num_stages, self.num_microbatches = stage.ticks.num_stages, stage.ticks.num_microbatches
        self.rounds = -(-self.num_microbatches // self.num_stages)

    def entries(self) -> Array:
        """Return the outputs for this stage's microbatches [rounds, ...]."""

        def one(_: None, number: Array) -> tuple[None, Array]:
            with self._busy():
                return None, self._apply(self.stage.parameters[FIRST_LAYERS], *self._own(number))

        return lax.scan(one, None, jnp.arange(self.rounds))[1]

    def entered(self, entries: Array, number: Array) -> Array:
        """Return the output for a microbatch, on all stages."""
        here = lax.dynamic_index_in_dim(entries, number // self.num_stages, keepdims=False)
        return self._summed(jnp.where(self._is_own(number), here, 0))

    def returned(self, entries: Array, number: Array, gradient: Array, exists: Array) -> Array:
        """Return `entries` with a microbatch's gradient, summed over the stages, in place of its output."""
        place, whole = number // self.num_stages, self._summed(gradient)
        here = lax.dynamic_index_in_dim(entries, place, keepdims=False)
        new = jnp.where(self._is_own(number) & exists, whole, here)
        return lax.dynamic_update_index_in_dim(entries, new, place, 0)

    def gradient(self, entries: Array, gradient: Tree) -> Tree:
        """Return `gradient` with that of the first layers and the embedding, when all are `returned`."""
        stage = self.stage
        layers, shardings, formats = (
            tree[FIRST_LAYERS] for tree in (stage.parameters, stage.shardings, stage.formats)
        )
        zeros = jax.tree.map(lambda p, f: jnp.zeros(p.shape, f), layers, formats)

        def one(total: Tree, number: Array) -> tuple[Tree, None]:
            own, x = self._own(number)
            exists = number * self.num_stages + stage.number < self.num_microbatches
            with self._busy():
                again = jax.checkpoint(lambda layers, x: self._apply(layers, own, x), prevent_cse=False)
                _, pullback = jax.vjp(again, stage.widened(layers), x)
                more, d_x = pullback(jnp.where(exists, entries[number], 0))
            added = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total[FIRST_LAYERS], more)
            total = {**total, FIRST_LAYERS: stage.pinned(added, shardings)}

            def embed(total: Tree, place: Array) -> tuple[Tree, None]:
                is_its = (stage.number == place) & exists
                microbatch = self._numbered(number, place)
                return stage.with_embedding(total, microbatch, jnp.where(is_its, d_x, 0)), None

            return lax.scan(embed, total, jnp.arange(self.num_stages))[0], None

        total = {**gradient, FIRST_LAYERS: stage.pinned(zeros, shardings)}
        return lax.scan(one, total, jnp.arange(self.rounds))[0]

    def _own(self, number: Array) -> tuple[Array, Array]:
        """Return the number of this stage's microbatch in a round, and its embedded tokens.

        All stages look up the tokens of all, because each has some rows of the table.
        """

        def one(x: Array, place: Array) -> tuple[Array, None]:
            found = self.stage.embedded(self._numbered(number, place))
            return jnp.where(self.stage.number == place, found, x), None

        like = jax.eval_shape(self.stage.embedded, jnp.int32(0))
        x, _ = lax.scan(one, jnp.zeros(like.shape, like.dtype), jnp.arange(self.num_stages))
        return self._numbered(number, self.stage.number), x

    def _apply(self, layers: Tree, number: Array, x: Array) -> Array:
        part, context = self.stage.microbatch(number)
        used = self.stage.model.for_layers(part, context)
        return self.stage.model.first_layers({FIRST_LAYERS: layers}, x, used, context)

    def _numbered(self, number: Array, place: Array) -> Array:
        return jnp.minimum(number * self.num_stages + place, self.num_microbatches - 1)

    def _is_own(self, number: Array) -> Array:
        return self.stage.number == number % self.num_stages

    def _summed(self, x: Array) -> Array:
        spec = activation_spec(RESIDUAL, self.stage.mesh)
        return on_each_device(lambda x: lax.psum(x, self.axis), self.stage.mesh, (spec,), spec)(x)

    def _busy(self) -> Any:
        """Return the scope of these layers' rounds, in the last of which some stages have no microbatch."""
        return jax.named_scope(f"busy_{self.num_microbatches}_of_{self.rounds * self.num_stages}")
