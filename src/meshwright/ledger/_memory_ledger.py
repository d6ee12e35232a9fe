"""Account for the memory of one device: what is reserved, what lives at the peak, and what the device allows.

XLA places every value of a program in an allocation (`*buffer-assignment.txt`). It also lists the
instructions of the flattened schedule during which the value lives (`*live-range.txt`). The texts are those
of a `Compiled` folder (forms of jaxlib 0.10 to 0.12). Text that is not understood raises an error.

Reserved: the sum of the compiler's allocations in device memory, without thread-local scratch. These are
arguments (donated ones once, with the outputs written over them), other outputs, constants and temporaries.
Peak: everything but the temporaries, plus the most that lives in the temporaries at one instant. A tuple's
table of pointers in a temporary is left out, as XLA leaves it out of `peak_memory_in_bytes`.
At that instant every allocation is divided among the values that live in it, each attributed by `Owners`. The
rest is fragmentation (of a temporary), idle (in a donated argument), or filed as outputs or constants. All
parts sum to reserved.
Not counted: what `allowance` lists; fragmentation inside the runtime's own allocator.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from meshwright.compiler import Argument, Compiled
from meshwright.hardware import Fleet
from meshwright.hlo import (
    Array,
    Computation,
    Dataflow,
    Instruction,
    Place,
    Program,
    ProgramPhases,
    held_as,
    leaves_of,
    module_of,
    parse_shape,
)
from meshwright.units import format_bytes

from ._ledger_records import (
    PARAMETERS,
    Buffer,
    MemoryLedger,
    Timeline,
    allowance,
    host_needs,
    usable_bytes,
)

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.+)$")
# The first of these words that occurs tells the kind of an allocation.
_KINDS = {
    ", parameter ": "parameter",
    ", thread-local": "thread-local",
    ", constant": "constant",
    "maybe-live-out": "output",
}
_RANGE = re.compile(r" {4}(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValue:
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
    values: tuple[LiveValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRange:
    """First and last instruction at which a value lives, both included."""

    first: int
    last: int


_Ranges = Mapping[tuple[str, str], LiveRange]  # by instruction and index in its tuple


def parse_assignment(text: str) -> tuple[Allocation, ...]:
    """Parse the text of a buffer assignment.

    Raises:
        ValueError: a line is not understood.
    """
    heads: list[re.Match[str]] = []
    values: list[list[LiveValue]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _VALUE.match(line):
            name, index, size, offset, shape = match.groups()
            value = LiveValue(
                name=name, index=index or "{}", num_bytes=int(size), offset_bytes=int(offset), shape=shape
            )
            values[-1].append(value)
        elif match := _ALLOCATION.match(line):
            heads.append(match)
            values.append([])
        elif line.strip() not in ("", "BufferAssignment:"):
            raise ValueError(f"buffer assignment, line {number} is not understood: {line[:200]}")
    return tuple(_allocation(head, tuple(held)) for head, held in zip(heads, values, strict=True))


def _allocation(head: re.Match[str], values: tuple[LiveValue, ...]) -> Allocation:
    size, words = head.groups()
    parameter = re.search(r", parameter (\d+)", words)
    color = re.search(r", color (\d+)", words)
    return Allocation(
        num_bytes=int(size),
        kind=next((kind for mark, kind in _KINDS.items() if mark in words), "temporary"),
        parameter=int(parameter[1]) if parameter else None,
        color=int(color[1]) if color else 0,
        values=values,
    )


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


def _range(value: LiveValue, ranges: _Ranges) -> LiveRange:
    if (value.name, value.index) not in ranges:
        raise ValueError(f"value {value.name}{value.index} has no live range")
    return ranges[value.name, value.index]


FLOATING = ("f64", "f32", "f16", "bf16")
_SCOPE = re.compile(r"[/(](loss|pad_vocabulary|unpad_vocabulary)[)/]")
_BY_SCOPE = {
    "loss": "logits_and_loss",
    "pad_vocabulary": "gathered_parameters",
    "unpad_vocabulary": "gradients",
}
_BY_PHASE = {
    "backward": "activation_gradients",
    "recompute": "recomputed_activations",
    "optimizer": "optimizer_temporaries",
}


@dataclass(frozen=True, slots=True)
class Owner:
    """The role of a value, the rule that decided it, and the rule's certainty.

    `operation` and `source_line` are "" where unknown. Certainties:
    * `structural`: the compiler's own facts: the path of an argument, or data that is only moved from one.
    * `named`: the path that JAX gave to the operation that computes the value (`jvp`, `transpose(jvp)`,
      `rematted_computation`, the scopes `loss` and `optimizer`).
    * `shape`: a value of the backward pass with the shape of a parameter, sharded or not. An activation of
      that shape would be mistaken for a gradient.
    * `inherited`: the compiler named nothing, so the phase is that of the neighbours.
    * `fallback`: none of the above.
    """

    category: str
    rule: str
    certainty: str
    phase: str = ""
    operation: str = ""
    source_line: str = ""


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
        arguments: Sequence[Argument],
        ranges: _Ranges,
        *,
        scopes_are_ours: bool,
    ) -> None:
        self._program, self._roles, self._scopes_are_ours = program, roles, scopes_are_ours
        self._dataflow, self._phases = Dataflow(program), ProgramPhases(program)
        self._numbers = {i.name: int(i.literal) for i in program.entry.parameters}
        self._ranges = ranges
        self._parameter_shapes = _parameter_shapes(program, roles, arguments)
        last = max((when.last for when in ranges.values()), default=0)
        self._backward_starts = self._first_backward(last + 1)
        self._has_backward = self._backward_starts <= last

    def of(self, value: LiveValue) -> Owner:
        """Return the owner of one value."""
        if value.name in self._numbers:
            role, path = self._roles[self._numbers[value.name]]
            return Owner(role, "an argument", "structural", operation=path)
        trail = self._dataflow.trail(value.name, value.index)
        if not trail:
            return Owner("other", "not in the program's text", "fallback")
        named = [place for place in trail if place[1].has_path]
        _, maker, _ = (named or trail)[-1]
        # What the compiler adds has no name, such as a slice before a collective: it serves its neighbour.
        near = maker if named else self._named_near(trail) or maker
        phase, line = self._phase(named or trail), self._program.source_line(near)

        def owner(category: str, rule: str, certainty: str, operation: str = near.op_name) -> Owner:
            return Owner(category, rule, certainty, phase, operation, line)

        number = self._dataflow.argument_of(trail[0])
        if number is not None:
            role, path = self._roles[number]
            category = "gathered_parameters" if role in PARAMETERS else role
            return owner(category, "moves an argument", "structural", near.op_name or path)
        shape = _array(value)
        if shape is not None and trail[0][1].opcode in ("custom-call", "fusion") and _is_bytes(shape):
            return owner("workspaces", "bytes of a library call", "structural")
        certainty = "named" if named else "inherited"
        scope = self._scope_of(maker)
        after_forward = phase in ("backward", "other") or (scope == "loss" and "transpose(" in maker.op_name)
        after_forward = after_forward and scope != "pad_vocabulary"
        if after_forward and self._has_shape_of_a_parameter(shape):
            return owner("gradients", "shape of a parameter", "shape" if named else "inherited")
        if scope:
            return owner(_BY_SCOPE[scope], f"scope {scope}", certainty)
        return owner(*self._by_phase(value, trail, phase, certainty))

    def _by_phase(
        self, value: LiveValue, trail: list[Place], phase: str, certainty: str
    ) -> tuple[str, str, str]:
        """Return category, rule and certainty of a value that only its phase or its users tell."""
        kept = phase == "forward" and self._is_kept(value, trail)
        if not kept and self._serves_a_collective(trail[0]):
            return "collective_staging", "a collective's buffer", "structural"
        if phase == "forward":
            category = "saved_activations" if kept else "forward_temporaries"
            return category, "made in the forward pass", certainty
        if phase != "other":
            return _BY_PHASE[phase], f"phase {phase}", certainty
        if said := self._said_by_scope(trail):
            return said, "scope held_as", certainty
        return "other", "phase other", "fallback"

    def _said_by_scope(self, trail: list[Place]) -> str:
        """Return the category that a scope of our step names along a trail; "" if none does."""
        if not self._scopes_are_ours:
            return ""
        return next(filter(None, (held_as(instruction.op_name) for _, instruction, _ in trail)), "")

    def _scope_of(self, maker: Instruction) -> str:
        """Return which of the scopes that decide a category an instruction is in; "" if none."""
        found = _SCOPE.search(maker.op_name) if self._scopes_are_ours else None
        return "" if found is None else found[1]

    def _named_near(self, trail: list[Place]) -> Instruction | None:
        """Return the named instruction nearest to a value without a name, or to what runs its computation."""
        for home, instruction, _ in trail:
            outside: tuple[Computation, Instruction] | None = (home, instruction)
            while outside is not None:
                if (near := self._phases.named_near(*outside)) is not None:
                    return near
                outside = self._dataflow.caller_of(outside[0])
        return None

    def _is_kept(self, value: LiveValue, trail: list[Place]) -> bool:
        """Return whether the backward pass uses a forward value or the stack that it is put into."""
        stacked = any(instruction.opcode == "dynamic-update-slice" for _, instruction, _ in trail)
        lives_on = self._ranges[value.name, value.index].last >= self._backward_starts
        return lives_on or (stacked and self._has_backward)

    def _phase(self, places: list[Place]) -> str:
        """Return the last phase along the trail that is not `other`, because loops' names often show none."""
        phases = (self._phases.of(home, instruction) for home, instruction, _ in reversed(places))
        return next((phase for phase in phases if phase != "other"), "other")

    def _serves_a_collective(self, place: Place) -> bool:
        """Return whether a collective makes the value, or is its only user."""
        home, instruction, _ = place
        users = home.users[instruction.name]
        return bool(instruction.collective or (len(users) == 1 and users[0].collective))

    def _has_shape_of_a_parameter(self, shape: Array | None) -> bool:
        if shape is None or shape.dtype not in FLOATING:
            return False
        return _without_ones(shape.dims) in self._parameter_shapes

    def _first_backward(self, otherwise: int) -> int:
        """Return the instant at which the first backward value is made; `otherwise` if none is made."""
        starts = [
            when.first
            for (name, _), when in self._ranges.items()
            if (place := self._dataflow.place_of(name)) is not None
            and place[1].has_path
            and self._phases.of(*place) == "backward"
        ]
        return min(starts, default=otherwise)


def _array(value: LiveValue) -> Array | None:
    """Return the shape of a value; None for a tuple's table of pointers."""
    leaves = leaves_of(parse_shape(value.shape))
    return leaves[0] if len(leaves) == 1 and not value.is_tuple_table else None


def _is_bytes(shape: Array) -> bool:
    return shape.dtype in ("u8", "s8") and len(shape.dims) == 1


def _without_ones(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size != 1))


def _parameter_shapes(
    program: Program, roles: Mapping[int, tuple[str, str]], arguments: Sequence[Argument]
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
        array = parameter.arrays[0]
        if (known and role != "parameters") or array.dtype not in FLOATING:
            continue
        both = [{here, there} for here, there in zip(array.dims, whole.get(path, array.dims), strict=True)]
        for dims in (both, both[1:]):
            shapes.update(_without_ones(choice) for choice in itertools.product(*dims))
    pads = (i for _, i in program.instructions() if "/pad_vocabulary/" in i.op_name)
    # Padded tables have no argument of their shape.
    rows = {max(array.dims) for instruction in pads for array in instruction.arrays if array.dims}
    widths = {size for dims in shapes if len(dims) == 2 for size in dims}
    shapes.update(_without_ones(dims) for dims in itertools.product(rows, widths))
    return shapes - {()}


HOST_COLORS = {"cuda": 5, "tpu": 4}
VECTOR_MEMORY = 1  # the color of a TPU's VMEM, on the chip: XLA prints S(1) in shapes placed there
NUM_INSTANTS = 200
_IDLE = {
    "temporary": "fragmentation",
    "parameter": "idle_in_donated_arguments",
    "output": "outputs",
    "constant": "constants",
}


def memory_of(
    program: Program, assignment: str, live_ranges: str, compiled: Compiled, fleet: Fleet
) -> MemoryLedger:
    """Return the memory ledger from the compiler's texts.

    The peak is computed here by a sweep over the live ranges. The compiler's own figure, which a record may
    have, is not used: for a CPU it leaves temporaries out, and for a GPU it takes the larger of those on the
    device and those in host memory for both. For a TPU it includes values on the chip; `notes` say so.

    Raises:
        ValueError: a text is not understood, or a value has no live range.
    """
    allocations = [a for a in parse_assignment(assignment) if a.kind != "thread-local"]
    ranges = _with_constants(parse_live_ranges(live_ranges), allocations)
    host_color = HOST_COLORS.get(compiled.platform)
    # A TPU's other colors are on-chip memories. A GPU's other colors (NCCL's buffers) are in main memory.
    held = [a for a in allocations if (a.color == 0 if compiled.platform == "tpu" else a.color != host_color)]
    host = [a for a in allocations if host_color is not None and a.color == host_color]
    temporaries = [a for a in held if a.kind == "temporary"]
    totals = _live_bytes(temporaries, ranges)
    instant = max(totals, key=lambda i: (totals[i], -i), default=0)
    rest = sum(a.num_bytes for a in held if a.kind != "temporary")
    peak = totals.get(instant, 0) + rest
    # XLA's figure includes arguments in host memory, but not the temporaries there.
    on_host = sum(a.num_bytes for a in host if a.kind == "parameter")
    reported = compiled.reported_bytes.get("peak_memory", 0) - on_host
    on_chip = [a for a in allocations if compiled.platform == "tpu" and a.color == VECTOR_MEMORY]
    notes: tuple[str, ...] = ()
    if on_chip and reported > 0:
        every = _live_bytes([*temporaries, *(a for a in on_chip if a.kind == "temporary")], ranges)
        notes = (_of_on_chip(reported, max(every.values(), default=0) + rest),)
    filing = _Filing(program, held, ranges, compiled)
    by_category, buffers = filing.at(instant)
    return MemoryLedger(
        reserved_bytes=sum(a.num_bytes for a in held),
        argument_bytes=sum(a.num_bytes for a in held if a.parameter is not None),
        peak_bytes=peak,
        allowance=allowance(fleet, compiled.mesh_axes),
        usable_bytes=usable_bytes(fleet),
        by_category=by_category,
        optimizer_state_by_moment=filing.bytes_by_moment(),
        buffers=buffers,
        timeline=filing.timeline(totals, instant),
        host_bytes=sum(a.num_bytes for a in host),
        host_needs=host_needs(fleet, compiled.arguments),
        on_chip_bytes=sum(a.num_bytes for a in on_chip),
        notes=notes,
    )


def _of_on_chip(reported: int, swept: int) -> str:
    """Describe how the peak that the compiler for TPUs reports differs from what is reserved."""
    words = (
        f"the compiler's peak of {format_bytes(reported)} counts in what lives in the chip's own memory "
        "(VMEM), of which nothing is reserved here"
    )
    if swept == reported:
        return words
    return f"{words}; its live ranges add up to {format_bytes(swept)} in both"


def _live_bytes(temporaries: list[Allocation], ranges: _Ranges) -> Counter[int]:
    """Return the live bytes of the temporaries at each instant at which a value is made.

    Values may share bytes (a loop's state and its body's parameter); shared bytes count once.
    """
    instants = sorted({_range(v, ranges).first for a in temporaries for v in a.values})
    changes = [0] * len(instants)
    for allocation in temporaries:
        before = 0
        for place, alive in _alive_through(allocation, ranges, instants):
            now = _covered_bytes(alive)
            changes[place] += now - before
            before = now
    return Counter(dict(zip(instants, itertools.accumulate(changes), strict=True)))


def _with_constants(
    ranges: dict[tuple[str, str], LiveRange], allocations: list[Allocation]
) -> dict[tuple[str, str], LiveRange]:
    """Return the live ranges with every constant included.

    XLA lists no live range for the constants of a sort's or reduction's computation. They live throughout.
    """
    whole = LiveRange(first=0, last=max((when.last for when in ranges.values()), default=0))
    constants = [v for a in allocations if a.kind == "constant" for v in a.values]
    return {**{(value.name, value.index): whole for value in constants}, **ranges}


def _alive_through(
    allocation: Allocation, ranges: _Ranges, instants: Sequence[int]
) -> Iterator[tuple[int, list[LiveValue]]]:
    """Yield each place in `instants` at which other values of an allocation live than before, with these.

    The values are sorted by offset, without tables of pointers.

    Args:
        instants: in rising order.
    """
    placed: list[tuple[LiveValue, int, int]] = []  # each value, and its first place and that after its last
    for value in allocation.values:
        when = _range(value, ranges)
        begin, end = bisect_left(instants, when.first), bisect_right(instants, when.last)
        if begin < end and not value.is_tuple_table:
            placed.append((value, begin, end))
    placed.sort(key=lambda each: (each[0].offset_bytes, -each[0].num_bytes))
    born: dict[int, list[int]] = {}  # the numbers in `placed` of the values that begin to live at a place
    gone: dict[int, list[int]] = {}
    for number, (_, begin, end) in enumerate(placed):
        born.setdefault(begin, []).append(number)
        gone.setdefault(end, []).append(number)
    alive: list[int] = []
    for place in sorted({*born, *gone}):
        if place == len(instants):
            return
        for number in gone.get(place, ()):
            del alive[bisect_left(alive, number)]
        for number in born.get(place, ()):
            insort(alive, number)
        yield place, [placed[number][0] for number in alive]


def _pieces(alive: list[LiveValue]) -> Iterator[tuple[LiveValue, int]]:
    """Yield each value with its bytes that no value before it covers, so that each byte counts once."""
    end = 0
    for value in alive:
        stop = value.offset_bytes + value.num_bytes
        if stop > end:
            yield value, stop - max(end, value.offset_bytes)
            end = stop


def _covered_bytes(alive: list[LiveValue]) -> int:
    """Return the sum of the bytes that `_pieces` yields: of a long step this is summed 10,000 times."""
    covered = end = 0
    for value in alive:
        start = value.offset_bytes
        stop = start + value.num_bytes
        if stop > end:
            covered += stop - (end if end > start else start)
            end = stop
    return covered


class _Filing:
    """Attribute the bytes of a program's allocations to their owners."""

    def __init__(self, program: Program, held: list[Allocation], ranges: _Ranges, compiled: Compiled) -> None:
        # XLA drops unused arguments, so arguments are matched by path. An array that the step closes over has
        # none in the program; it is matched by its number if no argument is dropped.
        self._arguments = {a.path: a for a in compiled.arguments}
        all_kept = len(program.entry.parameters) == len(compiled.arguments)
        self._roles: dict[int, tuple[str, str]] = {}
        for parameter in program.entry.parameters:
            number, path = int(parameter.literal), parameter.op_name
            if not path and all_kept:
                path = compiled.arguments[number].path
            argument = self._arguments.get(path)
            self._roles[number] = (argument.role if argument else "arguments", path)
        self._held, self._ranges = held, ranges
        self._last_instant = max((when.last for when in ranges.values()), default=0)
        ours = compiled.num_parameters is not None
        self._owners = Owners(program, self._roles, compiled.arguments, ranges, scopes_are_ours=ours)
        self._known: dict[tuple[str, str], Owner] = {}

    def at(self, instant: int) -> tuple[dict[str, int], tuple[Buffer, ...]]:
        """Return the bytes by category at an instant, and the buffers alive then, both largest first."""
        totals: Counter[str] = Counter()
        buffers: list[Buffer] = []
        for allocation in self._held:
            left = allocation.num_bytes
            for _, filed in self._filed(allocation, (instant,)):
                for value, num_bytes, owner in filed:
                    totals[owner.category] += num_bytes
                    buffers.append(self._buffer(value, num_bytes, owner))
                    left -= num_bytes
            totals[_IDLE[allocation.kind]] += left
        buffers.sort(key=lambda b: (-b.num_bytes, b.name))
        return {name: size for name, size in totals.most_common() if size}, tuple(buffers)

    def timeline(self, live_bytes: Mapping[int, int], peak: int) -> Timeline:
        """Return the bytes by category through the step, at up to `NUM_INSTANTS` instants and at the peak."""
        every = sorted(live_bytes)
        stride = max(1, -(-len(every) // NUM_INSTANTS))
        chosen = sorted({*every[::stride], peak}) if every else []
        changes: dict[str, list[int]] = {}
        for allocation in self._held:
            before: Counter[str] = Counter()
            for place, filed in self._filed(allocation, chosen):
                now: Counter[str] = Counter()
                for _, num_bytes, owner in filed:
                    now[owner.category] += num_bytes
                for name in dict.fromkeys((*before, *now)):
                    changes.setdefault(name, [0] * len(chosen))[place] += now[name] - before[name]
                before = now
        rows = {name: tuple(itertools.accumulate(made)) for name, made in changes.items()}
        names = sorted(rows, key=lambda name: (-max(rows[name]), name))
        return Timeline(
            instants=tuple(chosen),
            last_instant=self._last_instant,
            peak_instant=peak,
            by_category={name: rows[name] for name in names},
        )

    def bytes_by_moment(self) -> dict[str, int]:
        """Return the bytes of the optimizer's state by moment, most first."""
        by_moment: Counter[str] = Counter()
        for allocation in self._held:
            if allocation.parameter is not None:
                role, path = self._roles[allocation.parameter]
                if role == "optimizer_state":
                    by_moment[self._arguments[path].moment or "other"] += allocation.num_bytes
        return dict(by_moment.most_common())

    def _filed(
        self, allocation: Allocation, instants: Sequence[int]
    ) -> Iterator[tuple[int, list[tuple[LiveValue, int, Owner]]]]:
        """Yield the values of `_alive_through` as pieces with their owners."""
        for place, alive in _alive_through(allocation, self._ranges, instants):
            yield place, [(value, size, self._owner(value, allocation)) for value, size in _pieces(alive)]

    def _owner(self, value: LiveValue, allocation: Allocation) -> Owner:
        """Return a value's owner, or its category by what the allocation shows."""
        key = (value.name, value.index)
        if key not in self._known:
            owner = self._owners.of(value)
            if allocation.kind in ("constant", "output") and owner.rule != "an argument":
                category, rule = f"{allocation.kind}s", "the allocation's kind"
                owner = replace(owner, category=category, rule=rule, certainty="structural")
            elif allocation.parameter is not None and self._is_the_new_one(value, allocation):
                role, rule = self._roles[allocation.parameter][0], "the argument's new value"
                owner = replace(owner, category=role, rule=rule, certainty="structural")
            self._known[key] = owner
        return self._known[key]

    def _is_the_new_one(self, value: LiveValue, allocation: Allocation) -> bool:
        """Return whether a value in a donated argument's place is the output that the step returns there."""
        last = _range(value, self._ranges).last
        return value.num_bytes == allocation.num_bytes and last == self._last_instant

    def _buffer(self, value: LiveValue, num_bytes: int, owner: Owner) -> Buffer:
        when, argument = _range(value, self._ranges), self._arguments.get(owner.operation)
        return Buffer(
            name=value.name if value.index == "{}" else value.name + value.index,
            num_bytes=num_bytes,
            shape=value.shape.split("{")[0],
            format=leaves_of(parse_shape(value.shape))[0].dtype,
            moment=argument.moment if argument and owner.category == "optimizer_state" else "",
            module=module_of(owner.operation),
            first_instant=when.first,
            last_instant=when.last,
            **asdict(owner),
        )
