"""An account's tables, as text cells: what `str` of it and the terminal show. No torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.units import format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from ._records import Account, FlopCount, MemoryCount

NUM_MODULES = 10

Table = tuple[tuple[str, ...], list[tuple[str, ...]], frozenset[str]]  # header, rows, columns of numbers


def memory_table(memory: MemoryCount) -> Table:
    """Bytes by what they hold, the hand sum, and the peak."""
    held = {
        "parameters": memory.parameters_bytes,
        "buffers": memory.buffers_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_state_bytes,
        "inputs": memory.inputs_bytes,
        "saved activations": memory.saved_activation_bytes,
    }
    rows = [
        (name, format_bytes(size), f"{size:,}", ", ".join(sorted(memory.by_format.get(name, ()))))
        for name, size in held.items()
    ]
    for name, size, words in (
        ("hand sum", memory.hand_sum_bytes, "parameters, gradients, optimizer state, saved activations"),
        ("temporaries at the peak", memory.temporary_peak_bytes, "what is none of the above at that instant"),
        ("peak", memory.peak_bytes, f"in the {memory.peak_phase} pass"),
    ):
        rows.append((name, format_bytes(size), f"{size:,}", words))
    return ("memory", "", "bytes", "of"), rows, frozenset(("", "bytes"))


def flop_table(flops: FlopCount) -> Table:
    """FLOPs by pass."""
    passes = {
        "forward": (flops.forward, ""),
        "backward": (flops.backward, ""),
        "recomputed": (flops.recomputed, "part of backward"),
        "optimizer": (flops.optimizer, ""),
        "model": (flops.model, "forward and backward, nothing twice"),
    }
    rows = [
        (name, format_rate(count, "FLOP"), f"{count:,}", words) for name, (count, words) in passes.items()
    ]
    return ("pass", "", "FLOPs", "of"), rows, frozenset(("", "FLOPs"))


def module_table(account: Account, top: int = NUM_MODULES) -> Table:
    """The modules that cost the most, those without FLOPs and saved activations left out."""
    costs = {
        m.path: (m.forward_flops + m.backward_flops, m.saved_activation_bytes) for m in account.by_module
    }
    costly = [m for m in account.by_module if any(costs[m.path])]
    costly.sort(key=lambda m: costs[m.path], reverse=True)
    numbers = ("parameters", "forward", "backward", "saved")
    rows = [
        (
            m.path or "(all)",
            m.kind,
            format_count(m.num_parameters),
            format_rate(m.forward_flops, "FLOP"),
            format_rate(m.backward_flops, "FLOP"),
            format_bytes(m.saved_activation_bytes),
        )
        for m in costly[:top]
    ]
    return ("module", "kind", *numbers), rows, frozenset(numbers)


def unknown_table(account: Account) -> Table:
    """What has no rule, with its operands."""
    rows = [(name, f"{times:,}") for name, times in account.unknown.items()]
    return ("no rule, in no sum", "calls"), rows, frozenset(("calls",))
