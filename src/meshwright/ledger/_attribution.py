"""Read the compiler's buffer assignment, and attribute each value in memory to its role in a training step.

XLA places every value of a program in an allocation (`*buffer-assignment.txt`). It also lists the
instructions of the flattened schedule during which the value lives (`*live-range.txt`). The texts are those
of a `Compiled` folder (forms of jaxlib 0.10 to 0.12). Text that is not understood raises an error. A role is,
for example, parameter, gradient, or activation saved for the backward pass.

Each answer names the rule that produced it, and how certain that rule is:
* `structural`: the compiler's own facts: the path of an argument, or data that is only moved from one.
* `named`: the path that JAX gave to the operation that computes the value (`jvp`, `transpose(jvp)`,
  `rematted_computation`, the scopes `loss` and `optimizer`).
* `shape`: a value of the backward pass with the shape of a parameter, sharded or not. An activation of that
  shape would be mistaken for a gradient.
* `inherited`: the compiler named nothing, so the phase is that of the neighbours.
* `fallback`: none of the above.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.compiler import Argument

from ..hlo import (
    Array,
    Computation,
    Instruction,
    Origins,
    Phases,
    Place,
    Program,
    Sources,
    has_path,
    leaves_of,
    parse_shape,
)

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.+)$")
_RANGE = re.compile(r" {4}(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value in its allocation; `index` is its element in the instruction's tuple: "{2}", or "{}"."""

    name: str
    index: str
    num_bytes: int
    offset_bytes: int
    shape: str

    @property
    def is_tuple_table(self) -> bool:
        """True if the value is a tuple's table of pointers."""
        return self.shape.startswith("(")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of memory; `color` names the memory, and 0 is the device's main memory."""

    num_bytes: int
    kind: str  # parameter | constant | thread-local | temporary | output
    parameter: int | None
    color: int
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRange:
    """First and last instruction at which a value lives, both included."""

    first: int
    last: int


def parse_assignment(text: str) -> tuple[Allocation, ...]:
    """Parse the text of a buffer assignment.

    Raises:
        ValueError: a line is not understood.
    """
    heads: list[tuple[int, str]] = []
    values: list[list[Value]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _VALUE.match(line):
            name, index, size, offset, shape = match.groups()
            value = Value(
                name=name, index=index or "{}", num_bytes=int(size), offset_bytes=int(offset), shape=shape
            )
            values[-1].append(value)
        elif match := _ALLOCATION.match(line):
            heads.append((int(match[1]), match[2]))
            values.append([])
        elif line.strip() not in ("", "BufferAssignment:"):
            raise ValueError(f"buffer assignment, line {number} is not understood: {line[:200]}")
    return tuple(_allocation(*head, tuple(held)) for head, held in zip(heads, values, strict=True))


def parse_live_ranges(text: str) -> dict[tuple[str, str], LiveRange]:
    """Parse the live ranges, by (instruction, index in its tuple).

    Raises:
        ValueError: a line of the section is not understood, or the section is missing.
    """
    start, end = text.find("  BufferLiveRange:\n"), text.find("  Live ranges at ")
    if start < 0 or end < 0:
        raise ValueError(f"live ranges have no section of that name: {text[:200]!r}")
    ranges: dict[tuple[str, str], LiveRange] = {}
    for line in text[start:end].splitlines()[1:]:
        match = _RANGE.match(line)
        if not match:
            raise ValueError(f"live range is not understood: {line[:200]}")
        ranges[match[1], match[2]] = LiveRange(first=int(match[3]), last=int(match[4]))
    return ranges


def _allocation(num_bytes: int, words: str, values: tuple[Value, ...]) -> Allocation:
    parameter = re.search(r", parameter (\d+)", words)
    color = re.search(r", color (\d+)", words)
    if parameter:
        kind = "parameter"
    elif ", thread-local" in words:
        kind = "thread-local"
    elif ", constant" in words:
        kind = "constant"
    elif "maybe-live-out" in words:
        kind = "output"
    else:
        kind = "temporary"
    return Allocation(
        num_bytes=num_bytes,
        kind=kind,
        parameter=int(parameter[1]) if parameter else None,
        color=int(color[1]) if color else 0,
        values=values,
    )


FLOATING = ("f64", "f32", "f16", "bf16")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LOSS = re.compile(r"[/(]loss[)/]")
_MOVED = {"parameters": "gathered_parameters"}
_BY_PHASE = {
    "backward": "activation_gradients",
    "recompute": "recomputed_activations",
    "optimizer": "optimizer_temporaries",
    "other": "other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The role of a value, the rule that decided it, and the rule's certainty.

    `operation` and `source_line` are "" where unknown.
    """

    category: str
    rule: str
    certainty: str  # structural | named | shape | inherited | fallback
    phase: str
    operation: str
    source_line: str


class Owners:
    """Find the owners of the values of one program.

    Args:
        program: the optimised program.
        roles: role and path of each argument of the program, by its number.
        arguments: the arguments as they were requested, with their global shapes.
        ranges: the live range of each value.
        scopes_are_ours: whether a scope `loss` holds the loss alone, as in Meshwright's own steps.
    """

    def __init__(
        self,
        program: Program,
        roles: Mapping[int, tuple[str, str]],
        arguments: tuple[Argument, ...],
        ranges: Mapping[tuple[str, str], LiveRange],
        *,
        scopes_are_ours: bool,
    ) -> None:
        self._roles, self._scopes_are_ours = roles, scopes_are_ours
        self._origins, self._phases, self._sources = Origins(program), Phases(program), Sources(program)
        self._numbers = {i.name: int(i.literal) for i in program.entry.parameters}
        self._ranges = ranges
        self._parameter_shapes = _parameter_shapes(program, roles, arguments)
        last = max((when.last for when in ranges.values()), default=0)
        self._backward_starts = self._first_backward(last + 1)
        self._has_backward = self._backward_starts <= last

    def of(self, value: Value) -> Owner:
        """Return the owner of one value."""
        if value.name in self._numbers:
            role, path = self._roles[self._numbers[value.name]]
            return _owner(role, "an argument", "structural", operation=path)
        trail = self._origins.trail(value.name, value.index)
        if not trail:
            return _owner("other", "not in the program's text", "fallback")
        named = [place for place in trail if has_path(place[1])]
        _, maker, _ = named[-1] if named else trail[-1]
        phase = self._phase(named or trail)
        facts = {"phase": phase, "operation": maker.op_name, "source_line": self._origins.line_of(maker)}
        number = self._sources.argument_of(*trail[0])
        if number is not None:
            role, path = self._roles[number]
            moved = {**facts, "operation": facts["operation"] or path}
            return _owner(_MOVED.get(role, role), "moves an argument", "structural", **moved)
        shape = _array(value)
        if self._is_workspace(trail[0], shape):
            return _owner("workspaces", "bytes of a library call", "structural", **facts)
        certainty = "named" if named else "inherited"
        in_loss = self._scopes_are_ours and _LOSS.search(maker.op_name) is not None
        after_forward = phase in ("backward", "other") or (in_loss and "transpose(" in maker.op_name)
        if after_forward and self._has_shape_of_a_parameter(shape):
            return _owner("gradients", "shape of a parameter", "shape" if named else "inherited", **facts)
        if in_loss:
            return _owner("logits_and_loss", "scope loss", certainty, **facts)
        kept = phase == "forward" and self._is_kept(value, trail)
        if not kept and self._serves_a_collective(*trail[0][:2]):
            return _owner("collective_staging", "a collective's buffer", "structural", **facts)
        if phase == "forward":
            category = "saved_activations" if kept else "forward_temporaries"
            return _owner(category, "made in the forward pass", certainty, **facts)
        if phase == "other":
            certainty = "fallback"
        return _owner(_BY_PHASE[phase], f"phase {phase}", certainty, **facts)

    def filed_as(self, owner: Owner, category: str, rule: str) -> Owner:
        """Return the owner with another category and rule, for a reason that the value's allocation shows."""
        return replace(owner, category=category, rule=rule, certainty="structural")

    def _is_kept(self, value: Value, trail: list[Place]) -> bool:
        """Return whether the backward pass uses a forward value or the stack that it is put into."""
        stacked = any(instruction.opcode == "dynamic-update-slice" for _, instruction, _ in trail)
        lives_on = self._ranges[value.name, value.index].last >= self._backward_starts
        return lives_on or (stacked and self._has_backward)

    def _phase(self, places: list[Place]) -> str:
        """Return the last phase along the trail that is not `other`, because loops' names often show none."""
        found = [self._phases.of(home, instruction) for home, instruction, _ in places]
        return next((phase for phase in reversed(found) if phase != "other"), "other")

    def _serves_a_collective(self, home: Computation, instruction: Instruction) -> bool:
        """Return whether a collective makes the value, or is its only user."""
        users = self._phases.users_of(home, instruction)
        return any(
            i.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES
            for i in (instruction, *(users if len(users) == 1 else ()))
        )

    def _is_workspace(self, place: Place, shape: Array | None) -> bool:
        calls = place[1].opcode in ("custom-call", "fusion")
        return calls and shape is not None and shape.dtype in ("u8", "s8") and len(shape.dims) == 1

    def _has_shape_of_a_parameter(self, shape: Array | None) -> bool:
        if shape is None or shape.dtype not in FLOATING:
            return False
        return _without_ones(shape.dims) in self._parameter_shapes

    def _first_backward(self, otherwise: int) -> int:
        """Return the instant at which the first backward value is made; `otherwise` if none is made."""
        starts = [
            when.first
            for (name, _), when in self._ranges.items()
            if (place := self._origins.place_of(name)) is not None
            and has_path(place[1])
            and self._phases.of(*place) == "backward"
        ]
        return min(starts, default=otherwise)


def _owner(
    category: str, rule: str, certainty: str, *, phase: str = "", operation: str = "", source_line: str = ""
) -> Owner:
    return Owner(
        category=category,
        rule=rule,
        certainty=certainty,
        phase=phase,
        operation=operation,
        source_line=source_line,
    )


def _array(value: Value) -> Array | None:
    """Return the shape of a value; None for a tuple's table of pointers."""
    leaves = leaves_of(parse_shape(value.shape))
    return leaves[0] if len(leaves) == 1 and not value.is_tuple_table else None


def _without_ones(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size != 1))


def _parameter_shapes(
    program: Program, roles: Mapping[int, tuple[str, str]], arguments: tuple[Argument, ...]
) -> set[tuple[int, ...]]:
    """Return the dimensions that a parameter's gradient may have during a step, sorted and without ones.

    Each dimension is whole or sharded. The first may be missing, because it may be the layers that a loop
    runs over. Arrays of a single number are left out. Where no argument is named a parameter (a foreign
    program), every floating-point argument counts as one.
    """
    whole = {argument.path: argument.shape for argument in arguments}
    known = any(role == "parameters" for role, _ in roles.values())
    shapes: set[tuple[int, ...]] = set()
    for parameter in program.entry.parameters:
        role, path = roles[int(parameter.literal)]
        array = leaves_of(parameter.shape)[0]
        if (known and role != "parameters") or array.dtype not in FLOATING:
            continue
        both = [{here, there} for here, there in zip(array.dims, whole.get(path, array.dims), strict=True)]
        for dims in (both, both[1:]):
            shapes.update(_without_ones(choice) for choice in itertools.product(*dims))
    return shapes - {()}
