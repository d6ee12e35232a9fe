"""What a compiled program costs: the records. All figures are exact integers read off the program."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from meshwright.errors import InputError
from meshwright.formats import format_of_dtype

SCHEMA = 7
"""Of a ledger as JSON (docs/json.md). 2: memory by owner at the peak, timeline; FLOPs by module; links;
findings. 4: elementwise classes, torus dimensions, assumptions; sorts among the unpriced. 5: memory by number
format. 6: FLOPs in a pipeline's bubble. 7: on-chip memory, notes on the memory."""
UNUSED = "unused"
"""In `by_format`: bytes that are reserved and in which no value lives at the peak, so that they have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopLedger:
    """FLOPs of one whole step over all devices; a multiply-add is two.

    `model`: the traced program without dead code and recomputation, causal attention by the needed half,
    convolutions with their taps on padding.
    `executed`: matmuls, attention and convolutions (without taps on padding) of the optimised program times
    trip counts, summed over devices. `recomputed`: the part of `executed` that a rematerialised region runs
    for a second time.
    `by_phase`: `executed` by forward | backward | recompute | optimizer | other.
    `by_format`: `executed` by operand format (bf16, fp32, ...). `by_module`: `executed` by the model's own
    scopes ("layers/mlp_block/up"; "" where there is none), merged products shared among theirs.
    `model_by_module`: `model` likewise.
    `waste_by_module`: executed and not recomputed beyond `model` and bubble, by the scope around a module:
    work that several devices do alike, or on padding, or masked blocks of causal attention computed all the
    same. `bubble`: the part of `executed` that stages of a pipeline do without a microbatch, recomputation
    included.
    `rule_6nd`: the rule of thumb, 6 x parameters x tokens, where both are known.
    `elementwise_by_class`: operations of the optimised program that are no multiply-adds of a product, times
    trip counts, summed over devices, in none of the other counts: arithmetic | transcendental | comparison |
    reduction | conversion | integer, one for each element (`_elementwise` has the rules). Sorts and
    Fourier transforms are listed as unpriced.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One value alive at the peak instant on one device.

    `num_bytes`: those that no other value before it in the same place holds too. `rule`: why it is filed
    under its category, `certainty`: how sure that is (structural | named | shape | inherited | fallback).
    Instants count instructions in the order of the schedule, loops once; both ends are included.
    """

    name: str  # the instruction that makes it
    num_bytes: int
    shape: str  # as XLA prints it: "bf16[32,2,4096,4096]"
    format: str  # "bf16"
    category: str
    moment: str  # of optimizer state: "mu", "nu", "trace"
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

    An instant is a place in the schedule, not a time; a loop's body is passed once.
    """

    instants: tuple[int, ...]
    last_instant: int  # of the step
    peak_instant: int
    by_category: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Bytes of one device.

    `reserved_bytes`: what the program takes from the allocator; `by_category` sums to it: whose the bytes
    are at the peak instant, and what of the allocations is idle then. `argument_bytes`: of the reserved,
    what the program is given (a step: its state and batch). `peak_bytes`: the most that lives at
    one instant, by the compiler (None where it does not say). `buffers`: alive at the peak, largest first.
    `allowance`: what no compiler counts (context, libraries, NCCL), item by item, with sources in its
    function's docs. `usable_bytes`: what the chip's runtime gives.
    Fits: reserved + allowance <= usable. `host_bytes`: of the program, in host memory. `host_needs`: what a
    host of the fleet needs beside the program, item by item: see `host_needs` in `_allowance`.
    `on_chip_bytes`: of a TPU, allocations in the chip's own vector memory; in none of the other figures.
    `notes`: how the compiler's own figures differ.
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

    @property
    def by_certainty(self) -> dict[str, int]:
        """Bytes of `buffers` by how sure their filing is."""
        found: dict[str, int] = {}
        for buffer in self.buffers:
            found[buffer.certainty] = found.get(buffer.certainty, 0) + buffer.num_bytes
        return found

    @property
    def by_category_and_format(self) -> dict[str, dict[str, int]]:
        """Of each category in `by_category`, bytes by number format, most first; they sum to it.

        Formats have the project's names ("bf16", "fp8-e4m3"); one that the project does not know has the
        compiler's. `UNUSED` are bytes of an allocation in which no value lives at the peak.
        """
        found = {category: Counter[str]() for category in self.by_category}
        for buffer in self.buffers:
            found[buffer.category][_format_name(buffer.format)] += buffer.num_bytes
        for category, formats in found.items():
            if unused := self.by_category[category] - formats.total():
                formats[UNUSED] = unused
        return {category: dict(formats.most_common()) for category, formats in found.items()}

    @property
    def by_format(self) -> dict[str, int]:
        """The reserved bytes by number format, most first, over all categories."""
        found = Counter[str]()
        for formats in self.by_category_and_format.values():
            found.update(formats)
        return dict(found.most_common())

    @property
    def allowance_bytes(self) -> int:
        """Sum of the allowance's items."""
        return sum(self.allowance.values())

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where the chip's usable bytes are not known (a simulated CPU)."""
        if self.usable_bytes is None:
            return None
        return self.reserved_bytes + self.allowance_bytes <= self.usable_bytes


def _format_name(dtype: str) -> str:
    try:
        return format_of_dtype(dtype).name
    except InputError:
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """All collectives of one kind over the same mesh axes, per device and step.

    `link`: which class carries it: "inside" the fast domain (a host, a rack, a TPU slice) or "between" such;
    `link_name`: as the catalog calls that link, "" where it does not know it.
    `dimensions`: of a TPU slice's torus, those along which the members of a group lie ("x", "y", "z"; "core"
    between the two of one chip); empty where the devices' coordinates are not known, and on other chips. A
    group along several may use them at once, so bytes are not shared out among them. Where `link` is
    "between", the network between slices carries it too.
    `payload_bytes`: the result's bytes. `wire_bytes`: what one device sends: (N-1)/N of the full
    array for all-gather and reduce-scatter, 2(N-1)/N for all-reduce, (N-1)/N for all-to-all, all of
    it for collective-permute. `overlapped_count`: how many of `count` may run beside computation.
    """

    kind: str  # all-gather | reduce-scatter | all-reduce | all-to-all | collective-permute
    axes: tuple[str, ...]
    group_size: int
    count: int
    payload_bytes: int
    wire_bytes: int
    overlapped_count: int
    in_loop: bool
    link: str
    link_name: str
    dimensions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something in a sharded program that costs more than it need."""

    kind: str
    what: str  # with the values
    source_line: str  # "model.py:25", or "" where it has none
    mend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Memory, FLOPs and traffic of one compiled step, what has no rule, and what could be mended.

    `assumptions`: which branch of a conditional is counted, and which figures change because the compiler
    lacks an option that was asked for.
    """

    memory: MemoryLedger
    flops: FlopLedger
    traffic: tuple[Collective, ...]
    unpriced: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types, with what is derived: the `ledger` part of what `weigh --json` prints."""
        fields = dataclasses.asdict(self)
        memory = self.memory
        derived = {
            "allowance_bytes": memory.allowance_bytes,
            "fits": memory.fits,
            "by_certainty": memory.by_certainty,
            "by_format": memory.by_format,
            "by_category_and_format": memory.by_category_and_format,
        }
        return {"schema": SCHEMA, **fields, "memory": {**fields["memory"], **derived}}

    @staticmethod
    def from_json(text: str) -> Ledger:
        """The ledger that `to_dict` was taken of.

        Raises:
            InputError: the text is no ledger, or one of another schema.
        """
        try:
            fields = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise InputError(
                    f"a ledger of schema {fields['schema']}; this version reads {SCHEMA}",
                    hint="weigh again, or read it with the version that wrote it",
                )
            return TypeAdapter(Ledger).validate_python(fields)
        except (ValueError, KeyError, TypeError, RecursionError) as broken:
            raise InputError(
                f"this is no ledger: {broken}", hint="give the `ledger` part of `weigh --json`"
            ) from broken
