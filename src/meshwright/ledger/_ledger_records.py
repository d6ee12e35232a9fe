"""Hold the records of what a compiled program costs; all figures are exact integers read off the program.

What a device and its host need beside the program, no compiler counts: `allowance` and `host_needs` state it.
A request to the compiler needs these too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from meshwright.compiler import Argument
from meshwright.errors import InputError
from meshwright.formats import format_of_dtype
from meshwright.hardware import Fleet
from meshwright.json_records import read_record

SCHEMA = 9
"""The schema of a ledger as JSON (docs/reference/json.md).

2: memory by owner at the peak, timeline; FLOPs by module; links; findings. 4: elementwise classes, torus
dimensions, assumptions; sorts among the unpriced. 5: memory by number format. 6: FLOPs in a pipeline's
bubble. 7: on-chip memory, notes on the memory. 9: FLOPs and messages by source line."""
UNUSED = "unused"
"""In `by_format`: bytes that are reserved and in which no value lives at the peak, so that they have none."""
PARAMETERS = ("parameters", "frozen_parameters")
RESERVED = "reserved for another process"
GIBIBYTE, MEBIBYTE = 2**30, 2**20
STATE = (*PARAMETERS, "optimizer_state", "model_state", "keys", "step")
BATCHES_AHEAD = 2  # one in use on the devices, and one being made


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopLedger:
    """FLOPs of one whole step over all devices; a multiply-add is two.

    `model`: the traced program without dead code and recomputation. Causal attention counts by the needed
    half, and convolutions with their taps on padding.
    `executed`: matmuls, attention, convolutions (without taps on padding), decompositions and transforms of
    the optimised program times trip counts, summed over devices. `recomputed`: the part of `executed` that a
    rematerialised region runs for a second time.
    `by_phase`: `executed` by forward | backward | recompute | optimizer | other.
    `by_format`: `executed` by operand format (bf16, fp32, ...).
    `by_module`: `executed` by the model's own scopes ("layers/mlp_block/up"; "" outside any scope). Merged
    products are divided among the modules that they belong to.
    `model_by_module`: `model` by the same scopes.
    `waste_by_module`: work executed beyond `model`, without recomputation and bubble, by the scope around a
    module. Such work is duplicated on several devices, is done on padding, or computes masked blocks of
    causal attention.
    `bubble`: the part of `executed` that pipeline stages compute without a microbatch, including
    recomputation.
    `by_line`: `executed` by the source line of each product ("model.py:25"; "" where the compiler does not
    know it), then by operand format. It sums to `executed`.
    `rule_6nd`: the rule of thumb, 6 x parameters x tokens, where both are known and all parameters trained.
    `elementwise_by_class`: operations of the optimised program that are not multiply-adds of a product, times
    trip counts, summed over devices; in none of the other counts. Classes: arithmetic | transcendental |
    comparison | reduction | conversion | integer. Each operation counts one for each element (`_work_rules`
    has the rules). Sorts are listed as unpriced.
    """

    model: int
    executed: int
    recomputed: int
    by_phase: dict[str, int]
    by_format: dict[str, int]
    by_module: dict[str, int]
    model_by_module: dict[str, int]
    waste_by_module: dict[str, int]
    rule_6nd: int | None
    elementwise_by_class: dict[str, int] = field(default_factory=dict[str, int])
    bubble: int = 0
    by_line: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One value alive at the peak instant on one device.

    `num_bytes`: the bytes that no earlier value in the same place also holds. `rule`: the reason for its
    category. `certainty`: how certain that is (structural | named | shape | inherited | fallback).
    Instants count instructions in schedule order, loops once; both ends are included.
    """

    name: str  # the instruction that makes it
    num_bytes: int
    shape: str  # as XLA prints it: "bf16[32,2,4096,4096]"
    format: str  # "bf16"
    category: str
    moment: str  # for optimizer state: "mu", "nu", "trace"
    rule: str
    certainty: str
    phase: str
    module: str  # the model's own scopes: "layers/mlp_block/up"
    operation: str  # the op_name path, or an argument's path
    source_line: str  # "model.py:25", or "" where the compiler does not know
    first_instant: int
    last_instant: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes alive on one device through a step, by category, at each of `instants`.

    An instant is a position in the schedule, not a time. A loop's body is passed once.
    """

    instants: tuple[int, ...]
    last_instant: int  # the step's last
    peak_instant: int
    by_category: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Bytes of one device.

    `reserved_bytes`: what the program takes from the allocator.
    `by_category`: the reserved bytes by the category of their owner at the peak instant, including what is
    idle in the allocations then; it sums to `reserved_bytes`.
    `argument_bytes`: the part of the reserved bytes that holds arguments (for a step: its state and batch).
    `peak_bytes`: the most that lives at one instant.
    `buffers`: the values alive at the peak, largest first.
    `allowance`: what no compiler counts (context, libraries, NCCL), item by item; its sources are in the
    docstring of the function `allowance`.
    `usable_bytes`: what the chip's runtime allows a process. Fits: reserved + allowance <= usable.
    `host_bytes`: the program's bytes in host memory.
    `host_needs`: what a host of the fleet needs in addition to the program, item by item: see
    the function `host_needs`.
    `on_chip_bytes`: on a TPU, allocations in the chip's own vector memory; in none of the other figures.
    `notes`: how the compiler's own figures differ.
    `basis`: what the bytes are of, where they are not of the program that runs; "" where they are.
    `is_upper_bound`: the program that runs takes no more, and perhaps much less.
    """

    reserved_bytes: int
    argument_bytes: int
    peak_bytes: int | None
    allowance: dict[str, int]
    usable_bytes: int | None
    by_category: dict[str, int]
    optimizer_state_by_moment: dict[str, int]
    buffers: tuple[Buffer, ...]
    timeline: Timeline
    host_bytes: int = 0
    host_needs: dict[str, int] = field(default_factory=dict[str, int])
    on_chip_bytes: int = 0
    notes: tuple[str, ...] = ()
    basis: str = ""
    is_upper_bound: bool = False

    @property
    def by_certainty(self) -> dict[str, int]:
        """Bytes of `buffers` by the certainty of their category."""
        totals: Counter[str] = Counter()
        for buffer in self.buffers:
            totals[buffer.certainty] += buffer.num_bytes
        return dict(totals)

    @property
    def by_category_and_format(self) -> dict[str, dict[str, int]]:
        """Bytes of each category by number format, most first; they sum to `by_category`.

        Formats have the project's names ("bf16", "fp8-e4m3"); a format that the project does not know keeps
        the compiler's name. `UNUSED`: bytes of an allocation in which no value lives at the peak.
        """
        totals = {category: Counter[str]() for category in self.by_category}
        for buffer in self.buffers:
            totals[buffer.category][_format_name(buffer.format)] += buffer.num_bytes
        for category, formats in totals.items():
            if unused := self.by_category[category] - formats.total():
                formats[UNUSED] = unused
        return {category: dict(formats.most_common()) for category, formats in totals.items()}

    @property
    def by_format(self) -> dict[str, int]:
        """Reserved bytes by number format over all categories, most first."""
        totals = Counter[str]()
        for formats in self.by_category_and_format.values():
            totals.update(formats)
        return dict(totals.most_common())

    @property
    def allowance_bytes(self) -> int:
        """Sum of the allowance's items."""
        return sum(self.allowance.values())

    @property
    def fits(self) -> bool | None:
        """True if the program fits; None where that is not known.

        It is not where the chip's usable bytes are unknown (a simulated CPU), or less than an upper bound.
        """
        if self.usable_bytes is None:
            return None
        is_enough = self.reserved_bytes + self.allowance_bytes <= self.usable_bytes
        return None if self.is_upper_bound and not is_enough else is_enough


def _format_name(dtype: str) -> str:
    try:
        return format_of_dtype(dtype).name
    except InputError:
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """All collectives of one kind over the same mesh axes, per device and step.

    `link`: the class of link that carries it: "inside" a fast domain (a host, a rack, a TPU slice), or
    "between" domains. `link_name`: the catalog's name of that link, "" where it has none.
    `dimensions`: the dimensions of a TPU slice's torus along which members of a group differ ("x", "y", "z";
    "core" between the two cores of a chip); empty where the devices' coordinates are unknown, and on other
    chips. A group along several dimensions may use them at once, so bytes are not divided among them. Where
    `link` is "between", the network between slices carries it too.
    `payload_bytes`: the result's bytes; of ragged-all-to-all the operand's.
    `wire_bytes`: what one device sends: (N-1)/N of the full array for all-gather and reduce-scatter,
    2(N-1)/N for all-reduce, (N-1)/N for all-to-all (ragged too), all of it for collective-permute.
    `crossing_bytes`: of these, what leaves the fast domain, as an average over its devices (`crossing_bytes`
    in `_traffic` has the rules).
    `overlapped_count`: how many of `count` may run at the same time as computation.
    `by_line`: `wire_bytes` by the source line of the operation that needs the message; "" where the compiler
    does not know it.
    """

    kind: str  # all-gather | reduce-scatter | all-reduce | all-to-all | collective-permute
    axes: tuple[str, ...]
    group_size: int
    count: int
    payload_bytes: int
    wire_bytes: int
    crossing_bytes: int
    overlapped_count: int
    in_loop: bool
    link: str
    link_name: str
    dimensions: tuple[str, ...] = ()
    by_line: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something in a sharded program that costs more than it needs to."""

    kind: str
    what: str  # with the values
    source_line: str  # "model.py:25", or "" where it has none
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Memory, FLOPs and traffic of one compiled step.

    `unpriced`: work that has no rule. `findings`: what could be fixed. `assumptions`: which branch of a
    conditional is counted, and which figures change because the compiler lacks an option that was requested.
    """

    memory: MemoryLedger
    flops: FlopLedger
    traffic: tuple[Collective, ...]
    unpriced: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and derived figures as JSON types: the `ledger` part of `weigh --json`."""
        fields = dataclasses.asdict(self)
        names = ("allowance_bytes", "fits", "by_certainty", "by_format", "by_category_and_format")
        derived = {name: getattr(self.memory, name) for name in names}
        return {"schema": SCHEMA, **fields, "memory": {**fields["memory"], **derived}}

    @staticmethod
    def from_json(text: str) -> Ledger:
        """Read the ledger from the JSON text of `to_dict`.

        Raises:
            InputError: the text is not a ledger, or has another schema.
        """
        hint = "give the `ledger` part of `weigh --json`"
        return read_record(Ledger, text, name="a ledger", hint=hint, schema=SCHEMA)


def usable_bytes(fleet: Fleet) -> int | None:
    """Return the bytes that the chip's runtime allows a process; None for a simulated CPU or if unknown."""
    return None if fleet.chip.platform == "cpu" else fleet.chip.memory_bytes


def allowance(fleet: Fleet, mesh_axes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Return the bytes of one device that no compiler counts, item by item, as prior estimates.

    * CUDA context and loaded kernels: 0.8 GiB (0.47 to 0.92 observed; Stas Bekman's ML Engineering,
      PyTorch's CUDA notes). On an H100 the context took 0.54 GiB and the kernels of a Llama 1B in fp8 another
      0.10 (docs/results/measured.md). With less left, kernels do not load, and the run ends.
    * cuBLAS workspace: 32 MiB from Hopper on, 8.125 MiB before (PyTorch, ATen/cuda/CublasHandlePool.cpp).
    * NCCL, one communicator for every mesh axis of more than one device: 392 MB inside a fast domain
      (342 to 392 MB measured for 2 to 8 GPUs on NVLink, NVIDIA aiconfigurator), and 512 MiB of shared
      network buffer once where an axis leaves the domain (nccl#2363).
    * The fleet's reserve, which is another process's.

    Not counted: cuDNN's handles, for which no figure was found; fragmentation of the runtime's allocator.
    TPU: otherwise empty, because the memory that the runtime reports already excludes its own share. CPU:
    empty, because a simulated device has no memory of its own. Others: empty, because nothing is known.
    """
    chip = fleet.chip
    reserved = {RESERVED: fleet.reserve_bytes} if fleet.reserve_bytes else {}
    if chip.platform != "cuda":
        return reserved
    hopper = chip.target is not None and chip.target.compute_capability >= (9, 0)
    items = {
        "CUDA context and kernels": int(0.8 * GIBIBYTE),
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
    return items | reserved


def host_needs(fleet: Fleet, arguments: tuple[Argument, ...]) -> dict[str, int]:
    """Return the bytes of one host's memory that a run needs in addition to its program, item by item.

    * A checkpoint: a copy of the state that the host's devices hold, while it is written. Where devices hold
      the same replica, one copy would be enough, so this is an upper bound.
    * Batches: two for the host's devices, one in use and one being made.

    Not counted: the interpreter and its libraries (about 1 GB), the page cache of token files. The result is
    empty if no argument is known to be a parameter, and without batches if none is known to be one: a foreign
    program may name its arguments as it likes.
    """
    devices = min(fleet.chips_per_host, fleet.num_devices)
    state = sum(a.device_bytes for a in arguments if a.role in STATE and not a.host)
    batch = sum(a.device_bytes for a in arguments if a.role == "batch")
    if not any(a.role == "parameters" for a in arguments):
        return {}
    needs = {"a checkpoint's copy of the state": devices * state}
    return needs | ({"batches": BATCHES_AHEAD * devices * batch} if batch else {})
