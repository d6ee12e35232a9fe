"""Hold an exported module as records of names, shapes, formats and plain numbers, divided into its blocks.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ._array_rules import held
from ._layers import RANDOM, USES_ATTENTION

# What to do about a part of a module that has no counterpart.
AS_PYTORCH = "weigh the module as PyTorch runs it: without as_jax(), --as jax"
REPLACE = f"replace that part, or {AS_PYTORCH}"

AS_WRITTEN, BLOCKS, NOTHING = "module", "blocks", "none"
"""Names for what the backward pass recomputes: the module's own checkpoints, each repeated block, nothing."""


class GraphValue(NamedTuple):
    """A reference to the result of an operation, or to an argument."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """The shape and format of an array."""

    shape: tuple[int, ...]
    dtype: str

    def described(self) -> jax.ShapeDtypeStruct:
        """Return the array as JAX holds it: 64-bit formats in 32 bits unless `jax_enable_x64` is set."""
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
        return any(is_random(operation) for operation in self.operations)

    @property
    def read_parameters(self) -> frozenset[str]:
        """The names of the parameters that an operation reads."""
        read = {name for operation in self.operations for name in reads_of(operation)}
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


def is_random(operation: Operation) -> bool:
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
        reads = dict.fromkeys(name for each in operations for name in reads_of(each) if name not in made)
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


def reads_of(operation: Operation) -> list[str]:
    """Return the names of the values that an operation reads."""
    leaves = jax.tree.leaves((operation.args, operation.kwargs), is_leaf=lambda x: isinstance(x, GraphValue))
    return [leaf.name for leaf in leaves if isinstance(leaf, GraphValue)]
