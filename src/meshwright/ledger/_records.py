"""What a compiled program costs: the records. All figures are exact integers read off the program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopLedger:
    """FLOPs of one whole step over all devices; a multiply-add is two.

    `model`: the traced program, recomputation left out, causal attention by the needed half.
    `executed`: matmuls, attention and convolutions of the optimised program times trip counts,
    summed over devices. `recomputed`: the part of `executed` in a rematerialised region.
    `by_phase`: `executed` by forward | backward | recompute | optimizer | other.
    `by_format`: `executed` by operand format (bf16, fp32, ...).
    `rule_6nd`: the rule of thumb, 6 x parameters x tokens, where both are known.
    Not counted: elementwise arithmetic, reductions, sorts.
    """

    model: int
    executed: int
    recomputed: int
    by_phase: dict[str, int]
    by_format: dict[str, int]
    rule_6nd: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One value alive at the peak instant on one device."""

    name: str  # the instruction that makes it
    num_bytes: int
    shape: str  # as XLA prints it: "bf16[32,2,4096,4096]"
    category: str
    operation: str  # the op_name path, or an argument's path
    source_line: str  # "model.py:25", or "" where the compiler does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Bytes of one device.

    `reserved_bytes`: what the program takes from the allocator; `by_category` sums to it.
    `peak_bytes`: the most that lives at one instant, by the compiler (None where it does not say).
    `allowance`: what no compiler counts (context, libraries, NCCL), item by item, with sources in
    `predict`'s docs. `usable_bytes`: what the chip's runtime gives.
    Fits: reserved + allowance <= usable. `host_bytes`: of the program, in host memory.
    """

    reserved_bytes: int
    peak_bytes: int | None
    allowance: dict[str, int]
    usable_bytes: int | None
    by_category: dict[str, int]
    largest: tuple[Buffer, ...]
    host_bytes: int = 0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """All collectives of one kind over the same mesh axes, per device and step.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Memory, FLOPs and traffic of one compiled step, and what has no rule."""

    memory: MemoryLedger
    flops: FlopLedger
    traffic: tuple[Collective, ...]
    unpriced: tuple[str, ...]
