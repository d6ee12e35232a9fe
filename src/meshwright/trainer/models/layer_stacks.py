"""Run a stretch of the Transformer's layers: of one kind, or of several that take turns.

Parameters are stacked by the parts of a block: those of attention have as many rows as layers with attention.
A loop takes as many rows of each as one period has, which needs no copies. So compile time grows with the
blocks of a period, not with depth. On one GPU few blocks are unrolled, and `unroll` keeps their parameters
separate too, which is faster on a CPU.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from meshwright.config import Stretch, TransformerModel, block_policies
from meshwright.registry import room
from meshwright.sharding import axis_size, num_shards, ring_size

from ._base_model import Context, Parameter, Tree, is_parameter
from .attention import Documents
from .layer_gradients import places, slice_layer, summed, taken
from .loss import Balance
from .rematerialisation import BLOCK_INPUT, rematerialised
from .transformer_block import Block

Layer = tuple[Tree, Array]  # its parameters, and its number in the model, from 1


class LayerStack:
    """The layers of one stretch: what they declare, and what they compute."""

    def __init__(self, config: TransformerModel, stretch: Stretch) -> None:
        self.config, self.stretch = config, stretch
        kinds = {kind: Block(config, kind) for kind in stretch.period}
        self.period = [kinds[kind] for kind in stretch.period]

    # Parameters

    def parameters(self) -> Tree:
        """Return the declarations of all layers: stacked by the blocks' parts, or a list if unrolled."""
        return self.of_layers([block.declared for block in self.period])

    def of_layers(self, period: list[Tree]) -> Tree:
        """Return declarations of all layers from those of one period's blocks."""
        count = self.stretch.num_layers
        if self.config.unroll:
            return [period[layer % len(period)] for layer in range(count)]
        stacks, rows = dict[str, Tree](), self.rows(count)
        for part in {part: None for block in period for part in block}:
            each = [block[part] for block in period if part in block]
            assert all(one == each[0] for one in each), f"the layers of one stretch have unlike {part}"
            stacks[part] = jax.tree.map(partial(_stacked, rows[part]), each[0], is_leaf=is_parameter)
        return stacks

    def rows(self, num_layers: int) -> Counter[str]:
        """Return the rows that the first layers have in each stack, by the blocks' parts."""
        whole, rest = divmod(num_layers, len(self.period))
        counted = Counter({part: whole * number for part, number in self._rows_of_period.items()})
        counted.update(part for block in self.period[:rest] for part in block.declared)
        return counted

    @cached_property
    def _rows_of_period(self) -> Counter[str]:
        return Counter(part for block in self.period for part in block.declared)

    def layers_with(self, part: str) -> list[int]:
        """Return the numbers in the model, from 0, of the layers whose blocks have a part: its rows."""
        first, count = self.stretch.first, self.stretch.num_layers
        return [first + place for place in range(count) if part in self._block(place).declared]

    def layer_of(self, stacks: Tree, place: int) -> Tree:
        """Return the parameters of the layer at a place, counted from the first of `stacks`."""
        before = self.rows(place)
        return {part: _at(stacks[part], before[part]) for part in self._block(place).declared}

    def _block(self, place: int) -> Block:
        return self.period[place % len(self.period)]

    def unrolls(self, context: Context) -> bool:
        """Return whether the layers have no loop. Manual or not, `context` has messages in every layer."""
        of_rows = num_shards(context.mesh) // axis_size(context.mesh, "context")
        return self.config.unrolls(
            context.layer_loop,
            remat=context.remat,
            platform=context.platform,
            num_devices=of_rows * ring_size(context.mesh),
            num_layers=self.stretch.num_layers,
        )

    # Computation

    def blocks(
        self, context: Context, documents: Documents | None, scanned: bool, grouped: bool = False
    ) -> list[Any]:
        """Return the blocks of one group of layers.

        A block is a function of its input and (parameters, number). Each has its kind, and its policy of
        rematerialisation. If `grouped`, each takes the parameters and numbers of the whole group: a layer's,
        taken out before, would be saved as a copy.
        """

        def block(
            place: int, x: Array, layer: Layer, stacked: tuple[Tree, Array] | None = None
        ) -> tuple[Array, Balance | None]:
            x, (parameters, number) = checkpoint_name(x, BLOCK_INPUT), layer
            if grouped:
                parameters, number = self.layer_of(parameters, place), number[place]
            if context.held is not None:
                parameters = self._fetched(parameters, place, number, context)
            elif stacked is not None:
                parameters = slice_layer(parameters, *stacked)
            return self._block(place).apply(x, parameters, number, context, documents)

        policies = block_policies(context.remat)
        return [
            rematerialised(
                partial(block, place),
                replace(context, remat=policies[place % len(policies)]),
                scanned=scanned,
            )
            for place in range(self.group_size(context))
        ]

    def group_size(self, context: Context) -> int:
        """Return the number of layers after which their kinds and their policies repeat."""
        return math.lcm(len(self.period), len(block_policies(context.remat)))

    def _fetched(self, stand_in: Tree, place: int, number: Array, context: Context) -> Tree:
        """Return the parameters of the layer `number`, from 1, which wait in the hosts' memory."""
        assert context.held is not None, "no layers wait in the hosts' memory"
        stacks, size = context.held, len(self.period)
        index, before = number - 1 - self.stretch.first, self.rows(place % size)
        each = self._rows_of_period
        at = {part: index if size == 1 else index // size * each[part] + before[part] for part in stand_in}
        return room("offload").fetched(stand_in, {part: stacks[part] for part in stand_in}, at)

    def apply(
        self, layers: Tree, x: Array, context: Context, documents: Documents | None
    ) -> tuple[Float[Array, "batch sequence embed"], Balance | None]:
        """Apply the layers; return output and `Balance`."""
        name, first = self.stretch.name, self.stretch.first
        with jax.named_scope("layers"):
            if self.config.unroll:
                blocks = self.blocks(context, documents, scanned=False)
                numbered = list(zip(layers, first + jnp.arange(1, len(layers) + 1), strict=True))
                return one_by_one(blocks, x, numbered)
            totals = {} if context.sums is None else context.sums.get(name, {})
            held = None if context.held is None else context.held[name]
            (x, sums), balance = self._through(
                layers, (x, totals), replace(context, sums=None, held=held), documents
            )
            return summed(x, sums, totals), balance

    def _through(
        self, layers: Tree, carry: tuple[Array, Tree], context: Context, documents: Documents | None
    ) -> tuple[tuple[Array, Tree], Balance | None]:
        """Apply stacked layers; `carry` is their input, and the sums of their gradients or {}."""
        num_layers, size = self.stretch.num_layers, self.group_size(context)
        indices = self.stretch.first + jnp.arange(1, num_layers + 1)
        is_unrolled = self.unrolls(context)
        whole = num_layers // size * size
        # XLA takes a loop of one round apart, and would then keep what is computed again.
        scanned = not is_unrolled and (size == 1 or whole > size)
        blocks = self.blocks(context, documents, scanned=scanned, grouped=size > 1)
        rows = self.rows(size)

        def group(carry: tuple[Array, Tree], item: tuple[Layer, Array]) -> Any:
            (x, sums), ((layers, indices), place) = carry, item
            if sums:
                starts = {part: place if n == size else place // size * n for part, n in rows.items()}
                layers, sums = taken(layers, sums, starts)
            if size == 1:
                x, balance = blocks[0](x, (layers, indices), (stack, place) if is_unrolled else None)
            else:
                x, balance = one_by_one(blocks, x, [(layers, indices)] * size)
            return (x, sums), balance

        def in_rounds(count: int, stack: Tree) -> Tree:
            return jax.tree.map(
                lambda a: a[: whole // size * count].reshape(whole // size, count, *a.shape[1:]), stack
            )

        grouped, stack = (layers, indices), jax.lax.stop_gradient(layers)
        if size > 1:
            by_part = {part: in_rounds(rows[part], stacked) for part, stacked in layers.items()}
            grouped = by_part, in_rounds(size, indices)
        rounds = (grouped, places(num_layers, size))
        carry, balance = jax.lax.scan(group, carry, rounds, unroll=whole // size if is_unrolled else 1)
        if size > 1:
            balance = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), balance)
        if whole < num_layers:  # the last group is not whole
            x, sums = carry
            begun = self.rows(whole)
            rest = {
                part: jax.tree.map(lambda a, n=begun[part]: a[n:], stacked)
                for part, stacked in layers.items()
            }
            if sums:
                rest, sums = taken(rest, sums, {part: jnp.int32(begun[part]) for part in rest})
            each = [(self.layer_of(rest, n), indices[whole + n]) for n in range(num_layers - whole)]
            x, more = one_by_one(self.blocks(context, documents, scanned=False), x, each)
            carry, balance = (x, sums), joined([balance, more])
        return carry, balance


def one_by_one(blocks: list[Any], x: Array, layers: list[Layer]) -> tuple[Array, Balance | None]:
    """Apply `layers` in turn, each with the block for its index in the group; return output and `Balance`.

    Layers without experts have none.
    """
    each: list[Balance] = []
    for place, layer in enumerate(layers):
        x, one = blocks[place % len(blocks)](x, layer)
        each += [] if one is None else [one]
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *each) if each else None


def joined(balances: list[Balance | None]) -> Balance | None:
    """Return the `Balance` of layers after each other, of which some may have no experts."""
    each = [one for one in balances if one is not None]
    return jax.tree.map(lambda *layers: jnp.concatenate(layers), *each) if len(each) > 1 else (*each, None)[0]


def _stacked(count: int, parameter: Parameter) -> Parameter:
    return replace(parameter, shape=(count, *parameter.shape), dims=("layers", *parameter.dims))


def _at(stacked: Tree, place: int) -> Tree:
    return jax.tree.map(lambda a: a[place], stacked)
