"""Hold an exported module as records, and run it in JAX, operation by operation.

Imports no torch: the records hold names, shapes, formats and plain numbers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import InputError
from ._arrays import held
from ._layers import RANDOM, USES_ATTENTION
from ._rules import Attention, plain_attention, rule_of

Tree = Any
AS_WRITTEN, BLOCKS, NOTHING = "module", "blocks", "none"
"""What runs again in the backward pass: what the module checkpoints itself, each repeated block, nothing."""
Use = Callable[[str, jax.Array], jax.Array]


class GraphValue(NamedTuple):
    """A reference to the result of an operation, or to an argument."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """The shape and format of an array."""

    shape: tuple[int, ...]
    dtype: str

    def described(self) -> jax.ShapeDtypeStruct:
        """Return it as JAX holds it: 64-bit formats are 32 bits wide unless JAX is told otherwise."""
        return jax.ShapeDtypeStruct(self.shape, held(self.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One ATen operation.

    `name` and `overload`: "aten::add" and "Tensor". `arrays`: of its results, None for what is no array.
    `path`: of the module that runs it, as in `named_modules`. `checkpoint`: the number of the checkpointed
    region around it, or None.
    """

    result: str
    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arrays: tuple[ArraySpec | None, ...]
    is_tuple: bool
    path: str
    checkpoint: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProgram:
    """The training loss of a module.

    sources: placeholder -> "parameters", "buffers" or "inputs", and the name there.
    constants: placeholder -> its value.
    parameters, buffers, inputs: their shapes by name, in the formats in which the program uses them. A tied
        parameter is there once, under its first name.
    stored: parameter -> the format in which the module holds it.
    frozen: parameters that need no gradient.
    blocks: paths of repeated blocks.
    updates: buffer -> the value that it has after the step.
    result: the value that is the loss.
    notes: assumptions in words.
    """

    name: str
    operations: tuple[Operation, ...]
    sources: dict[str, tuple[str, str]]
    constants: dict[str, Any]
    parameters: dict[str, ArraySpec]
    stored: dict[str, str]
    frozen: tuple[str, ...]
    buffers: dict[str, ArraySpec]
    inputs: dict[str, ArraySpec]
    blocks: tuple[str, ...]
    updates: dict[str, str]
    result: str
    notes: tuple[str, ...]

    @property
    def is_random(self) -> bool:
        """Return whether an operation draws random numbers."""
        return any(_is_random(operation) for operation in self.operations)

    @property
    def read_parameters(self) -> frozenset[str]:
        """The names of the parameters that an operation reads."""
        read = {name for operation in self.operations for name in _reads(operation)}
        named = (self.sources[placeholder] for placeholder in read & self.sources.keys())
        return frozenset(name for kind, name in named if kind == "parameters")

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The ways to checkpoint that make different programs, the module's own first."""
        ways: dict[str, tuple[Any, ...]] = {}
        for way in (AS_WRITTEN, BLOCKS, NOTHING):
            found = tuple((segment.operations, segment.recomputes) for segment in segments_of(self, way))
            if found not in ways.values():
                ways[way] = found
        return tuple(ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSegment:
    """Operations that follow one another in one block, or between blocks.

    `reads`: values from before it. `writes`: values that are read after it. `recomputes`: whether all of it
    runs again in the backward pass. `block`: the path of its block, or "".
    """

    operations: tuple[Operation, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    recomputes: bool
    block: str


def _is_random(operation: Operation) -> bool:
    return operation.name in RANDOM or (operation.name in USES_ATTENTION and _dropout_rate(operation) > 0)


def _dropout_rate(operation: Operation) -> float:
    given = operation.args[4] if len(operation.args) > 4 else operation.kwargs.get("dropout_p", 0.0)
    return float(given)


def segments_of(program: ModuleProgram, checkpoint: str = AS_WRITTEN) -> tuple[GraphSegment, ...]:
    """Return the program divided into its blocks and checkpointed regions, in order.

    `checkpoint`: one of `program.checkpoints`.
    """
    block_of = _blocks_by_path(program)
    groups: list[tuple[tuple[int | None, str], list[Operation]]] = []
    for operation in program.operations:
        region = operation.checkpoint if checkpoint == AS_WRITTEN else None
        key = region, "" if region is not None else block_of(operation.path)
        if not groups or groups[-1][0] != key:
            groups.append((key, []))
        groups[-1][1].append(operation)
    wanted = {program.result, *program.updates.values()}
    segments: list[GraphSegment] = []
    for (region, block), operations in reversed(groups):
        made = {operation.result for operation in operations}
        reads = dict.fromkeys(name for each in operations for name in _reads(each) if name not in made)
        segment = GraphSegment(
            operations=tuple(operations),
            reads=tuple(reads),
            writes=tuple(each.result for each in operations if each.result in wanted),
            recomputes=region is not None or (checkpoint == BLOCKS and bool(block)),
            block=block or (block_of(operations[0].path) if region is not None else ""),
        )
        wanted |= set(reads)
        segments.append(segment)
    return tuple(reversed(segments))


def _blocks_by_path(program: ModuleProgram) -> Callable[[str], str]:
    blocks = set(program.blocks)
    known: dict[str, str] = {}

    def block_of(path: str) -> str:
        if path not in known:
            parts = path.split(".")
            starts = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
            known[path] = next((start for start in starts if start in blocks), "")
        return known[path]

    return block_of


def _reads(operation: Operation) -> list[str]:
    leaves = jax.tree.leaves((operation.args, operation.kwargs), is_leaf=lambda x: isinstance(x, GraphValue))
    return [leaf.name for leaf in leaves if isinstance(leaf, GraphValue)]


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
    """

    program: ModuleProgram
    attention: Attention = plain_attention
    use: Use = _as_it_is
    keeps: Callable[..., bool] | None = None
    checkpoint: str = AS_WRITTEN
    _segments: tuple[GraphSegment, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_segments", segments_of(self.program, self.checkpoint))

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
        for placeholder, (kind, name) in self.program.sources.items():
            values[placeholder] = given[kind][name]
            if kind == "parameters":
                raw[placeholder] = name
        # A user's own settings, such as strict promotion, are for the user's own code.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            offset = 0
            for segment in self._segments:
                values |= self._run(segment, values, raw, key, offset)
                offset += len(segment.operations)
        after = dict(buffers)
        for name, value in self.program.updates.items():
            after[name] = values[value]
        return values[self.program.result], after

    def _run(
        self, segment: GraphSegment, values: Mapping[str, Any], raw: Mapping[str, str], key: Any, offset: int
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
            run = jax.checkpoint(run)
        elif self.keeps is not None and segment.block:
            run = jax.checkpoint(run, policy=self.keeps)
        return run(arrays, key)

    def _result(self, operation: Operation, values: Mapping[str, Any], key: Any, number: int) -> Any:
        args = _filled(operation.args, values)
        kwargs = _filled(operation.kwargs, values)
        if operation.name == "getitem":
            return args[0][args[1]]
        rule = rule_of(operation.name, operation.overload)
        if _is_random(operation):
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
                raise InputError(
                    f"{_words(operation)}: {refused}",
                    hint="replace it, or weigh the module as PyTorch runs it: without as_='jax'",
                ) from refused
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
