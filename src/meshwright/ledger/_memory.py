"""Bytes of one device: what the program reserves, what lives at its peak, and what no compiler counts.

Reserved is the sum of the compiler's allocations in device memory, thread-local scratch left out: arguments
(donated ones once, with the outputs written over them), other outputs, constants, temporaries.
The peak is everything but the temporaries, plus the most that lives in those at one instant; a tuple's
table of pointers in a temporary is left out, as XLA leaves it out of `peak_memory_in_bytes`.
Not counted here: see `allowance`; and fragmentation inside the runtime's own allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from meshwright.compiler import Argument, Compiled
from meshwright.hardware import Fleet

from ._assignment import Allocation, LiveRange, Value, parse_assignment, parse_live_ranges
from ._origins import Origins
from ._records import Buffer, MemoryLedger
from .hlo import Program

NUM_LARGEST = 20
HOST_COLORS = {"cuda": 5, "tpu": 4}
GIBIBYTE, MEBIBYTE = 2**30, 2**20


def memory_of(
    program: Program, assignment: str, live_ranges: str, compiled: Compiled, fleet: Fleet
) -> tuple[MemoryLedger, tuple[str, ...]]:
    """The memory ledger from the compiler's texts, and what in it could not be explained.

    The peak is the sweep's own. Where the compiler for NVIDIA reports another, its figure is given and the
    difference is named; its CPU figure leaves temporaries out and its TPU figure counts on-chip memory in,
    so there the sweep's stands.

    Raises:
        ValueError: text that is not understood, or a value without a live range.
    """
    allocations = [a for a in parse_assignment(assignment) if a.kind != "thread-local"]
    ranges = parse_live_ranges(live_ranges)
    host_color = HOST_COLORS.get(compiled.platform)
    # A TPU's other colors are on-chip memories; a GPU's (NCCL's buffers) are all its main memory.
    held = [a for a in allocations if (a.color == 0 if compiled.platform == "tpu" else a.color != host_color)]
    host = [a for a in allocations if host_color is not None and a.color == host_color]
    arguments = _arguments(program, compiled.arguments)
    by_category: Counter[str] = Counter()
    for allocation in held:
        by_category[_category(allocation, arguments)] += allocation.num_bytes
    temporaries = [a for a in held if a.kind == "temporary"]
    instant, live_bytes = _peak(temporaries, ranges)
    peak = live_bytes + sum(a.num_bytes for a in held if a.kind != "temporary")
    unexplained: tuple[str, ...] = ()
    # XLA's figure holds the arguments that live in host memory, though not the host temporaries.
    on_host = sum(a.num_bytes for a in host if a.kind == "parameter")
    reported = compiled.reported_bytes.get("peak_memory", 0) - on_host
    if compiled.platform == "cuda" and reported > 0 and reported != peak:
        unexplained = (
            f"peak memory: the compiler reports {reported} bytes, its live ranges add up to {peak}",
        )
        peak = reported
    ledger = MemoryLedger(
        reserved_bytes=sum(a.num_bytes for a in held),
        peak_bytes=peak,
        allowance=allowance(fleet, compiled.mesh_axes),
        usable_bytes=usable_bytes(fleet),
        by_category=dict(by_category.most_common()),
        largest=_largest(program, held, ranges, instant, arguments),
        host_bytes=sum(a.num_bytes for a in host),
    )
    return ledger, unexplained


def _arguments(program: Program, known: tuple[Argument, ...]) -> dict[int, tuple[str, str]]:
    """By parameter number: the argument's role and its path. XLA drops unused arguments: match by path."""
    roles = {argument.path: argument.role for argument in known}
    found: dict[int, tuple[str, str]] = {}
    for parameter in program.entry.parameters:
        path = parameter.op_name
        found[int(parameter.literal)] = (roles.get(path, "arguments"), path)
    return found


def _category(allocation: Allocation, arguments: Mapping[int, tuple[str, str]]) -> str:
    if allocation.parameter is not None:
        return arguments[allocation.parameter][0]
    return {"output": "outputs", "constant": "constants", "temporary": "temporaries"}[allocation.kind]


def _peak(temporaries: list[Allocation], ranges: dict[tuple[str, str], LiveRange]) -> tuple[int, int]:
    """The first instant at which most bytes of the temporaries live, and how many.

    Values may share bytes (a loop's state and its body's parameter), so bytes are united, not added.
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
            totals[instant] += _united_bytes(alive)
    instant = max(instants, key=lambda i: (totals[i], -i), default=0)
    return instant, totals[instant]


def _range(value: Value, ranges: dict[tuple[str, str], LiveRange]) -> LiveRange:
    if (value.name, value.index) not in ranges:
        raise ValueError(f"value {value.name}{value.index} has no live range")
    return ranges[value.name, value.index]


def _alive(values: Iterable[Value], ranges: dict[tuple[str, str], LiveRange], instant: int) -> list[Value]:
    """Values alive at `instant` in the order of their place, tables of pointers left out."""
    alive: list[Value] = []
    for value in values:
        when = _range(value, ranges)
        if when.first <= instant <= when.last and not value.is_tuple_table:
            alive.append(value)
    return sorted(alive, key=lambda v: (v.offset_bytes, -v.num_bytes))


def _united_bytes(values: list[Value]) -> int:
    total = end = 0
    for value in values:
        stop = value.offset_bytes + value.num_bytes
        total += max(0, stop - max(end, value.offset_bytes))
        end = max(end, stop)
    return total


def _largest(
    program: Program,
    held: list[Allocation],
    ranges: dict[tuple[str, str], LiveRange],
    instant: int,
    arguments: Mapping[int, tuple[str, str]],
) -> tuple[Buffer, ...]:
    """The largest arguments, outputs and constants, and temporaries alive at `instant`, largest first."""
    found: list[tuple[str, Value, str]] = []  # category, value, argument's path
    for allocation in held:
        category = _category(allocation, arguments)
        if allocation.kind != "temporary":
            first = allocation.values[0]
            path = arguments[allocation.parameter][1] if allocation.parameter is not None else ""
            found.append((category, first, path))
            continue
        end = 0
        for value in _alive(allocation.values, ranges, instant):
            if value.offset_bytes + value.num_bytes > end:  # else it lies in bytes already listed
                found.append((category, value, ""))
                end = value.offset_bytes + value.num_bytes
    found.sort(key=lambda item: (-item[1].num_bytes, item[1].name, item[1].index))
    origins = Origins(program)
    return tuple(_buffer(origins, *item) for item in found[:NUM_LARGEST])


def _buffer(origins: Origins, category: str, value: Value, path: str) -> Buffer:
    operation, line = (path, "") if path else origins.of(value.name, value.index)
    return Buffer(
        name=value.name if value.index == "{}" else value.name + value.index,
        num_bytes=value.num_bytes,
        shape=value.shape.split("{")[0],
        category=category,
        operation=operation,
        source_line=line,
    )


def usable_bytes(fleet: Fleet) -> int | None:
    """What the chip's runtime gives a process; None for a simulated CPU, or where it is not known."""
    return None if fleet.chip.platform == "cpu" else fleet.chip.memory_bytes


def allowance(fleet: Fleet, mesh_axes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Bytes of one device that no compiler counts, item by item; priors until a calibration replaces them.

    * CUDA context and loaded kernels: 0.55 GiB (0.47 to 0.92 seen; Stas Bekman's ML Engineering, PyTorch's
      CUDA notes).
    * cuBLAS workspace: 32 MiB from Hopper on, 8.125 MiB before (PyTorch, ATen/cuda/CublasHandlePool.cpp).
    * NCCL, one communicator for every mesh axis of more than one device: 392 MB inside a fast domain
      (342 to 392 MB measured for 2 to 8 GPUs on NVLink, NVIDIA aiconfigurator), and 512 MiB of shared
      network buffer once where an axis leaves the domain (nccl#2363).

    Not counted: cuDNN's handles, for which no figure was found; fragmentation of the runtime's allocator.
    TPU: nothing, for the runtime's share is already taken from the memory it reports. CPU: nothing, for
    a simulated device has no memory of its own. Others: nothing is known.
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
