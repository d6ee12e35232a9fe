"""Find the mesh axes along which all devices hold the same value.

Every value of the program gets the set of axes along which devices may differ, starting from the shardings of
the arguments. The result of an operation may differ wherever one of its operands may. A gather or a reduction
over an axis makes the result identical along it. A scatter, an exchange or the device's own number makes it
differ. Loops are followed until the sets no longer change. If an axis is missing from a value's set, the
value is certain to be identical along it. If the axis is in the set, the value may still be identical.
Each value also records whether it depends on the batch, because masks and positions are identical by nature.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable

from meshwright.compiler import Compiled

from ..hlo import Array, Axes, Computation, Instruction, Operand, Program, Shape, iota_of
from ._traffic import KINDS, KINDS_WITHOUT_RULE, message_of

# A set of axes as bits in the mesh's order. The next higher bit says that the value depends on the batch.
Value = int | tuple["Value", ...]
_DEVICES = re.compile(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(.*)\}$")
_ANYTHING = frozenset(("partition-id", "replica-id", "rng", "infeed", "recv", "recv-done"))


class Alike:
    """Find the values of one program that are identical along mesh axes.

    `batch_axes`: axes that split an argument of the batch. `forward_axes`: axes along which any value that
    the forward pass computes from the batch may differ.
    """

    def __init__(self, program: Program, compiled: Compiled) -> None:
        self._program = program
        self._split = {argument.path: argument.axes for argument in compiled.arguments}
        self._mesh_axes = compiled.mesh_axes
        self._names = tuple(name for name, _ in compiled.mesh_axes)
        self._everywhere = (1 << len(self._names)) - 1
        self._batch = 1 << len(self._names)
        self._found: dict[str, Value] = {}
        self._done: dict[tuple[str, tuple[Value, ...]], Value] = {}
        self._forward = 0
        batch = _batch_arguments(program, compiled)
        arguments = tuple(
            self._argument(parameter, int(parameter.literal) in batch)
            for parameter in program.entry.parameters
        )
        self.batch_axes = self._axes(_union(arguments[number] for number in batch))
        self._computation(program.entry, arguments)
        self.forward_axes = self._axes(self._forward)

    def along(self, name: str, index: tuple[int, ...]) -> tuple[str, ...] | None:
        """Return the axes of more than one device along which all devices hold the same value.

        Return None for a value that is unknown or does not depend on the batch.
        """
        value = self._found.get(name)
        for place in index:
            if not isinstance(value, tuple):
                break
            value = value[place]
        if value is None or not (mask := _flat(value)) & self._batch:
            return None
        differing = self._axes(mask)
        return tuple(name for name, size in self._mesh_axes if size > 1 and name not in differing)

    def _axes(self, mask: int) -> tuple[str, ...]:
        return tuple(name for place, name in enumerate(self._names) if mask >> place & 1)

    def _mask(self, names: tuple[str, ...]) -> int:
        return sum(1 << self._names.index(name) for name in names)

    def _argument(self, parameter: Instruction, of_the_batch: bool) -> int:
        printed = parameter.attributes.get("sharding", "")
        # XLA of jaxlib 0.12 prints no sharding in the optimised program, so the requested one is used there.
        split = axes_of_sharding(printed, self._mesh_axes) if printed else self._split.get(parameter.op_name)
        mask = self._everywhere if split is None else self._mask(split)
        return mask | (self._batch if of_the_batch else 0)

    def _computation(self, computation: Computation, arguments: tuple[Value, ...]) -> Value:
        key = (computation.name, arguments)
        if key not in self._done:
            values: dict[str, Value] = {}
            for instruction in computation.instructions:
                value = self._value(computation, instruction, values, arguments)
                values[instruction.name] = value
                known = self._found.get(instruction.name)
                self._found[instruction.name] = value if known is None else _join(known, value)
                mask = _flat(value)
                if mask & self._batch and "jvp(" in instruction.op_name:
                    self._forward |= 0 if "transpose(" in instruction.op_name else mask
            self._done[key] = values[computation.root.name]
        return self._done[key]

    def _value(
        self,
        computation: Computation,
        instruction: Instruction,
        values: dict[str, Value],
        arguments: tuple[Value, ...],
    ) -> Value:
        opcode = instruction.opcode
        operands = [_picked(values, operand) for operand in instruction.operands]
        if opcode == "parameter":
            return arguments[int(instruction.literal)]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element" and isinstance(operands[0], tuple):
            return operands[0][int(instruction.attributes["index"])]
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._branches(instruction, operands)
        if opcode in ("fusion", "call"):
            return self._computation(self._program.computations[instruction.all_called[0]], tuple(operands))
        if opcode.endswith("-done") and not instruction.all_called:
            started = computation.by_name[instruction.operands[0].name]
            return self._completed(computation, instruction, started, values)
        mask = _union(operands)
        if opcode in KINDS:
            return self._exchanged(computation, instruction, instruction.shape, operands)
        if opcode in KINDS_WITHOUT_RULE or opcode in _ANYTHING:
            mask |= self._everywhere
        return _filled(instruction.shape, mask)

    def _completed(
        self, computation: Computation, done: Instruction, started: Instruction, values: dict[str, Value]
    ) -> Value:
        """Return the value that a `-done` completes; `-update` instructions may come before it."""
        while started.opcode.endswith("-update"):
            started = computation.by_name[started.operands[0].name]
        operands = [_picked(values, operand) for operand in started.operands]
        if started.opcode == "async-start":
            return self._computation(self._program.computations[started.all_called[0]], tuple(operands))
        if started.opcode.removesuffix("-start") in KINDS:
            return self._exchanged(computation, started, done.shape, operands)
        return _filled(done.shape, _union(operands))

    def _exchanged(
        self, computation: Computation, instruction: Instruction, shape: Shape, operands: list[Value]
    ) -> Value:
        message = message_of(computation, instruction, self._mesh_axes)
        masks = [_flat(operand) for operand in operands]
        if message is not None:
            masks = [self._after(message.kind, message.axes, message.group_size, mask) for mask in masks]
        if isinstance(shape, tuple) and len(shape) == len(masks):
            return tuple(_filled(part, mask) for part, mask in zip(shape, masks, strict=True))
        return _filled(shape, _union(masks))

    def _after(self, kind: str, axes: tuple[str, ...] | None, group_size: int, mask: int) -> int:
        if axes is None:  # groups that are not a block of the mesh may make any axis differ
            return mask | self._everywhere
        if kind not in ("all-gather", "all-reduce"):
            return mask | self._mask(axes)
        whole = math.prod(size for name, size in self._mesh_axes if name in axes) == group_size
        return mask & ~self._mask(axes) if whole else mask

    def _loop(self, loop: Instruction, state: Value) -> Value:
        body, condition = (self._program.computations[loop.called[key][0]] for key in ("body", "condition"))
        while True:
            goes_on = _flat(self._computation(condition, (state,))) & self._everywhere
            following = _with(_join(state, self._computation(body, (state,))), goes_on)
            if following == state:
                return state
            state = following

    def _branches(self, instruction: Instruction, operands: list[Value]) -> Value:
        found: Value | None = None
        for name, operand in zip(instruction.all_called, operands[1:], strict=True):
            value = self._computation(self._program.computations[name], (operand,))
            found = value if found is None else _join(found, value)
        assert found is not None, f"%{instruction.name} has no branches"
        return _with(found, _flat(operands[0]))


@functools.lru_cache(maxsize=10_000)
def axes_of_sharding(text: str, mesh_axes: Axes) -> tuple[str, ...] | None:
    """Return the mesh axes over which a sharding, as XLA prints it, splits an array; None where unknown."""
    if text == "{replicated}":
        return ()
    match = _DEVICES.match(text)
    if match is None:
        return None
    tiles, dims = ([int(n) for n in match[k].split(",")] for k in (1, 2))
    order = tuple(int(n) for n in match[3].split(",")) if match[3] else ()
    alike = 1
    if "last_tile_dim_replicate" in match[4]:
        alike = tiles[-1]
    elif "last_tile_dims" in match[4]:
        return None
    tile_of = {device: place // alike for place, device in enumerate(iota_of(tuple(dims), order))}
    if len(tile_of) != math.prod(size for _, size in mesh_axes):
        return None
    found: list[str] = []
    stride = len(tile_of)
    for name, size in mesh_axes:
        stride //= size
        first = {device: device - device // stride % size * stride for device in tile_of}
        if any(tile_of[device] != tile_of[first[device]] for device in tile_of):
            found.append(name)
    return tuple(found)


def _batch_arguments(program: Program, compiled: Compiled) -> set[int]:
    """Return the numbers of the arguments that form the batch.

    Meshwright's own steps record them. In a foreign program they are the arguments for which the program
    returns no array of the same type and shape.
    """
    roles = {argument.path: argument.role for argument in compiled.arguments}
    if compiled.num_parameters is not None:
        return {int(p.literal) for p in program.entry.parameters if roles.get(p.op_name) == "batch"}
    given = Counter((a.dtype, a.dims) for a in program.entry.root.shapes)
    found: set[int] = set()
    for parameter in program.entry.parameters:
        key = (parameter.shapes[0].dtype, parameter.shapes[0].dims)
        if given[key]:
            given[key] -= 1
        else:
            found.add(int(parameter.literal))
    return found


def _picked(values: dict[str, Value], operand: Operand) -> Value:
    value = values[operand.name]
    for place in operand.index:
        value = value[place] if isinstance(value, tuple) else value
    return value


def _flat(value: Value) -> int:
    return value if isinstance(value, int) else _union(value)


def _union(values: Iterable[Value]) -> int:
    mask = 0
    for value in values:
        mask |= _flat(value)
    return mask


def _filled(shape: Shape, mask: int) -> Value:
    return mask if isinstance(shape, Array) else tuple(_filled(part, mask) for part in shape)


def _join(one: Value, other: Value) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(_join(a, b) for a, b in zip(one, other, strict=True))
    return _flat(one) | _flat(other)


def _with(value: Value, mask: int) -> Value:
    return tuple(_with(part, mask) for part in value) if isinstance(value, tuple) else value | mask
