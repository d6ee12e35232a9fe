"""Account for the memory of one device: what is reserved, what lives at the peak, and what the device allows.

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

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshwright.compiler import Argument, Compiled
from meshwright.hardware import Fleet
from meshwright.hlo import module_of
from meshwright.units import format_bytes

from ..hlo import Program, leaves_of, parse_shape
from ._attribution import Allocation, LiveRange, Owner, Owners, Value, parse_assignment, parse_live_ranges
from ._records import Buffer, MemoryLedger, Timeline

GIBIBYTE, MEBIBYTE = 2**30, 2**20


def usable_bytes(fleet: Fleet) -> int | None:
    """Return the bytes that the chip's runtime allows a process; None for a simulated CPU or if unknown."""
    return None if fleet.chip.platform == "cpu" else fleet.chip.memory_bytes


def allowance(fleet: Fleet, mesh_axes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Return the bytes of one device that no compiler counts, item by item, as prior estimates.

    * CUDA context and loaded kernels: 0.55 GiB (0.47 to 0.92 observed; Stas Bekman's ML Engineering,
      PyTorch's CUDA notes).
    * cuBLAS workspace: 32 MiB from Hopper on, 8.125 MiB before (PyTorch, ATen/cuda/CublasHandlePool.cpp).
    * NCCL, one communicator for every mesh axis of more than one device: 392 MB inside a fast domain
      (342 to 392 MB measured for 2 to 8 GPUs on NVLink, NVIDIA aiconfigurator), and 512 MiB of shared
      network buffer once where an axis leaves the domain (nccl#2363).

    Not counted: cuDNN's handles, for which no figure was found; fragmentation of the runtime's allocator.
    TPU: empty, because the memory that the runtime reports already excludes its own share. CPU: empty,
    because a simulated device has no memory of its own. Others: empty, because nothing is known.
    """
    chip = fleet.chip
    if chip.platform != "cuda":
        return {}
    hopper = chip.target is not None and chip.target.compute_capability >= (9, 0)
    items = {
        "CUDA context and kernels": int(0.55 * GIBIBYTE),
        "cuBLAS workspace": 32 * MEBIBYTE if hopper else int(8.125 * MEBIBYTE),
    }
    stride = 1
    crosses = False
    for name, size in reversed(mesh_axes):
        if size > 1:
            items[f"NCCL communicator of {name}"] = 392_000_000
            crosses |= stride * size > fleet.chips_per_domain
        stride *= size
    if crosses:
        items["NCCL network buffer"] = 512 * MEBIBYTE
    return items


STATE = ("parameters", "optimizer_state", "model_state", "keys", "step")
BATCHES_AHEAD = 2  # one in use on the devices, and one being made


def host_needs(fleet: Fleet, arguments: tuple[Argument, ...]) -> dict[str, int]:
    """Return the bytes of one host's memory that a run needs in addition to its program, item by item.

    * A checkpoint: a copy of the state that the host's devices hold, while it is written. Where devices hold
      the same replica, one copy would be enough, so this is an upper bound.
    * Batches: two for the host's devices, one in use and one being made.

    Not counted: the interpreter and its libraries (about 1 GB), the page cache of token files. The result is
    empty for a foreign program, because the roles of its arguments are unknown.
    """
    devices = min(fleet.chips_per_host, fleet.num_devices)
    state = sum(a.device_bytes for a in arguments if a.role in STATE and not a.host)
    batch = sum(a.device_bytes for a in arguments if a.role == "batch")
    if not any(a.role == "parameters" for a in arguments):
        return {}
    return {"a checkpoint's copy of the state": devices * state, "batches": BATCHES_AHEAD * devices * batch}


HOST_COLORS = {"cuda": 5, "tpu": 4}
VECTOR_MEMORY = 1  # the color of a TPU's VMEM, on the chip: XLA prints S(1) in shapes placed there
NUM_INSTANTS = 200
_IDLE = {
    "temporary": "fragmentation",
    "parameter": "idle_in_donated_arguments",
    "output": "outputs",
    "constant": "constants",
}
_Ranges = Mapping[tuple[str, str], LiveRange]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Bytes of an allocation that one value holds at an instant."""

    value: Value
    num_bytes: int


def memory_of(
    program: Program, assignment: str, live_ranges: str, compiled: Compiled, fleet: Fleet
) -> MemoryLedger:
    """Return the memory ledger from the compiler's texts.

    The peak is computed here by a sweep over the live ranges. If the compiler for NVIDIA reports another
    figure, that figure is used, and `notes` record the difference. The compiler's CPU figure leaves
    temporaries out and is not used. Its TPU figure includes values on the chip and is not used either;
    `notes` say so.

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
    if compiled.platform == "cuda" and reported > 0 and reported != peak:
        notes = (f"peak memory: the compiler reports {reported} bytes, its live ranges add up to {peak}",)
        peak = reported
    filing = _Filing(program, held, ranges, compiled)
    by_category, buffers = filing.at(instant)
    return MemoryLedger(
        reserved_bytes=sum(a.num_bytes for a in held),
        argument_bytes=sum(a.num_bytes for a in held if a.parameter is not None),
        peak_bytes=peak,
        allowance=allowance(fleet, compiled.mesh_axes),
        usable_bytes=usable_bytes(fleet),
        by_category=by_category,
        optimizer_state_by_moment=_by_moment(held, filing.roles, compiled.arguments),
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


def _roles(program: Program, known: tuple[Argument, ...]) -> dict[int, tuple[str, str]]:
    """Return each argument's role and path by parameter number.

    XLA drops unused arguments, so arguments are matched by path.
    """
    roles = {argument.path: argument.role for argument in known}
    found: dict[int, tuple[str, str]] = {}
    for parameter in program.entry.parameters:
        path = parameter.op_name
        found[int(parameter.literal)] = (roles.get(path, "arguments"), path)
    return found


def _by_moment(
    held: list[Allocation], roles: Mapping[int, tuple[str, str]], known: tuple[Argument, ...]
) -> dict[str, int]:
    moments = {argument.path: argument.moment for argument in known}
    found: Counter[str] = Counter()
    for allocation in held:
        if allocation.parameter is not None and roles[allocation.parameter][0] == "optimizer_state":
            path = roles[allocation.parameter][1]
            found[moments.get(path, "") or "other"] += allocation.num_bytes
    return dict(found.most_common())


def _live_bytes(temporaries: list[Allocation], ranges: _Ranges) -> Counter[int]:
    """Return the live bytes of the temporaries at each instant at which a value is made.

    Values may share bytes (a loop's state and its body's parameter); shared bytes count once.
    """
    totals: Counter[int] = Counter()
    instants = sorted({_range(v, ranges).first for a in temporaries for v in a.values})
    for allocation in temporaries:
        waiting = sorted(allocation.values, key=lambda v: -_range(v, ranges).first)
        alive: list[Value] = []
        for instant in instants:
            while waiting and _range(waiting[-1], ranges).first <= instant:
                alive.append(waiting.pop())
            alive = _alive(alive, ranges, instant)
            totals[instant] += sum(piece.num_bytes for piece in _pieces(alive))
    return totals


def _with_constants(
    ranges: dict[tuple[str, str], LiveRange], allocations: list[Allocation]
) -> dict[tuple[str, str], LiveRange]:
    """Return the live ranges with every constant included.

    XLA lists no live range for the constants of a sort's or reduction's computation. They live throughout.
    """
    whole = LiveRange(first=0, last=max((when.last for when in ranges.values()), default=0))
    constants = [v for a in allocations if a.kind == "constant" for v in a.values]
    return {**{(value.name, value.index): whole for value in constants}, **ranges}


def _range(value: Value, ranges: _Ranges) -> LiveRange:
    if (value.name, value.index) not in ranges:
        raise ValueError(f"value {value.name}{value.index} has no live range")
    return ranges[value.name, value.index]


def _alive(values: Iterable[Value], ranges: _Ranges, instant: int) -> list[Value]:
    """Return the values alive at `instant` by offset, without tables of pointers."""
    alive: list[Value] = []
    for value in values:
        when = _range(value, ranges)
        if when.first <= instant <= when.last and not value.is_tuple_table:
            alive.append(value)
    return sorted(alive, key=lambda v: (v.offset_bytes, -v.num_bytes))


def _pieces(alive: list[Value]) -> Iterator[_Piece]:
    """Yield the bytes of each value that no value before it covers, so that each byte counts once."""
    end = 0
    for value in alive:
        stop = value.offset_bytes + value.num_bytes
        if stop > end:
            yield _Piece(value=value, num_bytes=stop - max(end, value.offset_bytes))
            end = stop


class _Filing:
    """Attribute the bytes of a program's allocations to their owners."""

    def __init__(self, program: Program, held: list[Allocation], ranges: _Ranges, compiled: Compiled) -> None:
        self.roles = _roles(program, compiled.arguments)
        self._held, self._ranges = held, ranges
        self._last_instant = max((when.last for when in ranges.values()), default=0)
        self._arguments = {a.path: a for a in compiled.arguments}
        ours = compiled.num_parameters is not None
        self._owners = Owners(program, self.roles, compiled.arguments, ranges, scopes_are_ours=ours)
        self._known: dict[tuple[str, str], Owner] = {}

    def at(self, instant: int) -> tuple[dict[str, int], tuple[Buffer, ...]]:
        """Return the bytes by category at an instant, and the buffers alive then, both largest first."""
        totals: Counter[str] = Counter()
        buffers: list[Buffer] = []
        for allocation in self._held:
            left = allocation.num_bytes
            for piece, owner in self._filed(allocation, instant):
                totals[owner.category] += piece.num_bytes
                buffers.append(self._buffer(piece, owner))
                left -= piece.num_bytes
            totals[_IDLE[allocation.kind]] += left
        buffers.sort(key=lambda b: (-b.num_bytes, b.name))
        return {name: size for name, size in totals.most_common() if size}, tuple(buffers)

    def timeline(self, live_bytes: Mapping[int, int], peak: int) -> Timeline:
        """Return the bytes by category through the step, at up to `NUM_INSTANTS` instants and at the peak."""
        every = sorted(live_bytes)
        stride = max(1, -(-len(every) // NUM_INSTANTS))
        chosen = sorted({*every[::stride], peak}) if every else []
        rows: list[Counter[str]] = []
        for instant in chosen:
            totals: Counter[str] = Counter()
            for allocation in self._held:
                for piece, owner in self._filed(allocation, instant):
                    totals[owner.category] += piece.num_bytes
            rows.append(totals)
        names = sorted({name for row in rows for name in row}, key=lambda n: -max(row[n] for row in rows))
        return Timeline(
            instants=tuple(chosen),
            last_instant=self._last_instant,
            peak_instant=peak,
            by_category={name: tuple(row[name] for row in rows) for name in names},
        )

    def _filed(self, allocation: Allocation, instant: int) -> Iterator[tuple[_Piece, Owner]]:
        for piece in _pieces(_alive(allocation.values, self._ranges, instant)):
            yield piece, self._owner(piece.value, allocation)

    def _owner(self, value: Value, allocation: Allocation) -> Owner:
        key = (value.name, value.index)
        if key not in self._known:
            owner = self._owners.of(value)
            if allocation.kind in ("constant", "output") and owner.rule != "an argument":
                owner = self._owners.filed_as(owner, f"{allocation.kind}s", "the allocation's kind")
            elif allocation.parameter is not None and self._is_the_new_one(value, allocation):
                role = self.roles[allocation.parameter][0]
                owner = self._owners.filed_as(owner, role, "the argument's new value")
            self._known[key] = owner
        return self._known[key]

    def _is_the_new_one(self, value: Value, allocation: Allocation) -> bool:
        """Return whether a value in a donated argument's place is the output that the step returns there."""
        last = _range(value, self._ranges).last
        return value.num_bytes == allocation.num_bytes and last == self._last_instant

    def _buffer(self, piece: _Piece, owner: Owner) -> Buffer:
        value, when = piece.value, _range(piece.value, self._ranges)
        argument = self._arguments.get(owner.operation)
        return Buffer(
            name=value.name if value.index == "{}" else value.name + value.index,
            num_bytes=piece.num_bytes,
            shape=value.shape.split("{")[0],
            format=leaves_of(parse_shape(value.shape))[0].dtype,
            category=owner.category,
            moment=argument.moment if argument and owner.category == "optimizer_state" else "",
            rule=owner.rule,
            certainty=owner.certainty,
            phase=owner.phase,
            module=module_of(owner.operation),
            operation=owner.operation,
            source_line=owner.source_line,
            first_instant=when.first,
            last_instant=when.last,
        )
