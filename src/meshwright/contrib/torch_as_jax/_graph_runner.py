"""Run an exported module in JAX, operation by operation, and repeated blocks as one loop if asked to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import InputError

from ._aten_rules import Attention, plain_attention, rule_of
from ._layers import USES_ATTENTION
from ._module_program import (
    AS_WRITTEN,
    REPLACE,
    GraphSegment,
    GraphValue,
    ModuleProgram,
    Operation,
    is_random,
    segments_of,
)
from ._repeats import Repeat, repeats_of, stack_name

Use = Callable[[str, jax.Array], jax.Array]


def _as_it_is(name: str, value: jax.Array) -> jax.Array:
    return value


@dataclass(frozen=True, kw_only=True)
class GraphRunner:
    """Run a program in JAX.

    Args:
        program: the program.
        attention: computes `scaled_dot_product_attention`.
        use: called with each parameter's name and value where a segment reads it, and returns what it uses.
        keeps: the policy of `jax.checkpoint` for what a block keeps for its backward pass; all of it if None.
        checkpoint: what runs again in the backward pass, one of `program.checkpoints`.
        loops: whether equal blocks that follow one another run as one loop. Their parameters are then given
            as stacks, by the names of `stacks`.
    """

    program: ModuleProgram
    attention: Attention = plain_attention
    use: Use = _as_it_is
    keeps: Callable[..., bool] | None = None
    checkpoint: str = AS_WRITTEN
    loops: bool = False
    _segments: tuple[GraphSegment, ...] = field(init=False)
    _repeats: Mapping[int, Repeat] = field(init=False)

    def __post_init__(self) -> None:
        segments = segments_of(self.program, self.checkpoint)
        found = repeats_of(self.program, segments) if self.loops else ()
        object.__setattr__(self, "_segments", segments)
        object.__setattr__(self, "_repeats", {each.first: each for each in found})

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """The names of the parameters in each stack, by the stack's name."""
        each = (names for repeat in self._repeats.values() for names in repeat.parameters.values())
        return {stack_name(names): names for names in each}

    def loss(
        self,
        parameters: Mapping[str, jax.Array],
        buffers: Mapping[str, jax.Array],
        inputs: Mapping[str, jax.Array],
        key: jax.Array | None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the loss, and the buffers after the step."""
        given = {"parameters": parameters, "buffers": buffers, "inputs": inputs}
        values: dict[str, Any] = dict(self.program.constants)
        raw: dict[str, str] = {}
        stacked = {name for names in self.stacks.values() for name in names}
        for placeholder, (kind, name) in self.program.sources.items():
            if kind == "parameters":
                raw[placeholder] = name
            if kind != "parameters" or name not in stacked:
                values[placeholder] = given[kind][name]
        # A user's own settings, such as strict promotion, are for the user's own code.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            offset = place = 0
            while place < len(self._segments):
                if repeat := self._repeats.get(place):
                    values |= self._loop(repeat, values, parameters, raw, key, offset)
                    offset += repeat.count * repeat.num_operations
                    place += repeat.length
                    continue
                segment = self._segments[place]
                values |= self._run(segment, values, raw, key, offset)
                offset += len(segment.operations)
                place += 1
        after = dict(buffers)
        for name, value in self.program.updates.items():
            after[name] = values[value]
        return values[self.program.result], after

    def _loop(
        self,
        repeat: Repeat,
        values: Mapping[str, Any],
        parameters: Mapping[str, jax.Array],
        raw: Mapping[str, str],
        key: Any,
        offset: int,
    ) -> dict[str, Any]:
        """Return the values that are read after a loop."""
        own = {name: parameters[stack_name(names)] for name, names in repeat.parameters.items()}
        own |= {name: jnp.stack([values[x] for x in names]) for name, names in repeat.buffers.items()}

        def unit(carry: dict[str, jax.Array], given: tuple[dict[str, jax.Array], jax.Array]) -> Any:
            here, number = {**values, **carry, **given[0]}, offset + given[1] * repeat.num_operations
            for segment in repeat.unit:
                here |= self._run(segment, here, raw, key, number, in_loop=True)
                number += len(segment.operations)
            after = {name: here[source] for name, source in repeat.carried.items()}
            return after, {name: here[name] for name in repeat.each}

        carry = {name: jnp.asarray(values[name]) for name in repeat.carried}
        carry, made = lax.scan(unit, carry, (own, jnp.arange(repeat.count)))
        found = {name: made[first][n] for first, names in repeat.each.items() for n, name in enumerate(names)}
        return found | {repeat.last[source]: carry[name] for name, source in repeat.carried.items()}

    def _run(
        self,
        segment: GraphSegment,
        values: Mapping[str, Any],
        raw: Mapping[str, str],
        key: Any,
        offset: Any,
        in_loop: bool = False,
    ) -> dict[str, Any]:
        """Return the values that a segment writes."""
        arrays = {name: values[name] for name in segment.reads if isinstance(values[name], jax.Array)}
        fixed = {name: values[name] for name in segment.reads if name not in arrays}

        def run(arrays: dict[str, Any], key: Any) -> dict[str, Any]:
            here = {**fixed, **arrays}
            for placeholder in (name for name in arrays if name in raw):
                name = raw[placeholder]
                with _scope(name.rpartition(".")[0]):
                    here[placeholder] = self.use(name, here[placeholder])
            for number, operation in enumerate(segment.operations):
                here[operation.result] = self._result(operation, here, key, offset + number)
            return {name: here[name] for name in segment.writes}

        if segment.recomputes:
            run = jax.checkpoint(run, prevent_cse=not in_loop)
        elif self.keeps is not None and segment.block:
            run = jax.checkpoint(run, policy=self.keeps, prevent_cse=not in_loop)
        return run(arrays, key)

    def _result(self, operation: Operation, values: Mapping[str, Any], key: Any, number: Any) -> Any:
        args = _filled(operation.args, values)
        kwargs = _filled(operation.kwargs, values)
        if operation.name == "getitem":
            return args[0][args[1]]
        rule = rule_of(operation.name, operation.overload)
        if is_random(operation):
            if key is None:
                raise InputError(
                    f"{_words(operation)} draws random numbers, and no key is given",
                    hint="give key=jax.random.key(0), or put the module in evaluation mode: module.eval()",
                )
            kwargs["random"] = jax.random.fold_in(key, number)
        if operation.name in USES_ATTENTION:
            kwargs["attention"] = self.attention
        with _scope(operation.path):
            try:
                result = rule(*args, **kwargs)
            except NotImplementedError as refused:
                raise InputError(f"{_words(operation)}: {refused}", hint=REPLACE) from refused
            return _in_format(operation, result)


def _filled(tree: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(tree, GraphValue):
        return values[tree.name]
    if isinstance(tree, list | tuple):
        return [_filled(leaf, values) for leaf in tree]
    if isinstance(tree, dict):
        return {name: _filled(leaf, values) for name, leaf in tree.items()}
    return tree


def _words(operation: Operation) -> str:
    return f"{operation.name.replace('::', '.')} in {operation.path or 'the module itself'}"


def _in_format(operation: Operation, result: Any) -> Any:
    """Return the results in the formats that PyTorch has for them; their shapes are equal already."""
    results: Sequence[Any] = result if operation.is_tuple else (result,)
    made = []
    for array, value in zip(operation.arrays, results, strict=True):
        if array is None or value is None:
            made.append(value)
            continue
        told = array.described()
        assert jnp.shape(value) == told.shape, f"{_words(operation)}: {jnp.shape(value)}, not {told.shape}"
        made.append(jnp.asarray(value, told.dtype))
    return tuple(made) if operation.is_tuple else made[0]


def _scope(path: str) -> Any:
    """Return the scope of a module: its path without numbers, so that equal layers share one."""
    parts = [part for part in re.split(r"\W+", path) if part and not part.isdigit()]
    return jax.named_scope("/".join(parts)) if parts else contextlib.nullcontext()
