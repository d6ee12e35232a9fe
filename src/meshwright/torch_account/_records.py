"""Hold the account of a PyTorch module, and format it as JSON and as tables. Imports no torch.

`str` of an `Account` and the terminal show the same tables of text cells.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from meshwright.units import aligned, format_bytes, format_count, format_rate

NUM_MODULES = 10

Table = tuple[tuple[str, ...], list[tuple[str, ...]], frozenset[str]]  # header, rows, columns of numbers


def memory_table(memory: MemoryCount) -> Table:
    """Return bytes by category, the hand sum, and the peak."""
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
    """Return FLOPs by pass."""
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
    """Return the `top` most expensive modules, without those that have no FLOPs and no saved activations."""
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
    """Return the operations without a rule, with their operands and calls."""
    rows = [(name, f"{times:,}") for name, times in account.unknown.items()]
    return ("no rule, in no sum", "calls"), rows, frozenset(("calls",))


SCHEMA = 1
SOURCE = "torch eager, one device, not compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """FLOPs of one step: matrix products, convolutions, attention, recurrent layers; a multiply-add is two.

    recomputed: the part of `backward` that repeats the forward pass: recomputed checkpointed blocks, and the
        scores that fused attention does not keep.
    by_operation, by_format: all passes together; the format is that of the first operand.
    """

    forward: int
    backward: int
    recomputed: int
    optimizer: int
    by_operation: dict[str, int]
    by_format: dict[str, int]

    @property
    def model(self) -> int:
        """Forward and backward FLOPs without recomputation: the model FLOPs of `weigh`, which MFU uses."""
        return self.forward + self.backward - self.recomputed

    @property
    def total(self) -> int:
        """All FLOPs that the step executes."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCount:
    """Bytes on one device, exactly those of the storages, without an allocator's rounding.

    gradients_bytes: gradients of parameters, and of inputs that require one, after the backward pass.
    inputs_bytes: the inputs, and tensors that the module or the loss takes from elsewhere.
    saved_activation_bytes: storages that autograd keeps for the backward pass, at the end of the forward
        pass. Each counts once. Parameters, buffers and inputs are excluded; autocast's copies of weights are
        included.
    peak_bytes: the most that is alive at one instant of a step after the first: the optimizer state exists
        from the start, the gradients do not.
    temporary_peak_bytes: the part of the peak that is none of the above at that instant.
    peak_phase: forward | backward | optimizer, the phase of the peak.
    at_peak: the peak by category; adds up to `peak_bytes`.
    by_format: category -> number format -> bytes, after the backward pass; saved activations after the
        forward pass.
    """

    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    inputs_bytes: int
    saved_activation_bytes: int
    temporary_peak_bytes: int
    peak_bytes: int
    peak_phase: str
    at_peak: dict[str, int]
    by_format: dict[str, dict[str, int]]

    @property
    def hand_sum_bytes(self) -> int:
        """Parameters, saved activations, gradients and optimizer state: the usual hand-computed sum."""
        return (
            self.parameters_bytes
            + self.saved_activation_bytes
            + self.gradients_bytes
            + self.optimizer_state_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCount:
    """One module with its children; `path` is as in `named_modules`, "" for the module itself.

    `backward_flops` include `recomputed_flops`. Work outside all modules, such as a loss function, is in no
    row. `saved_activation_bytes`: each storage belongs to the module that first kept it.
    """

    path: str
    kind: str
    num_parameters: int
    forward_flops: int
    backward_flops: int
    recomputed_flops: int
    saved_activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The cost of one training step of a PyTorch module on one device.

    unknown: operations that may do arithmetic and have no rule, with their operands' shapes -> calls; their
        FLOPs are in no sum.
    conventions: the assumptions for this module, in sentences.
    """

    name: str
    num_parameters: int
    flops: FlopCount
    memory: MemoryCount
    by_module: tuple[ModuleCount, ...]
    unknown: dict[str, int]
    conventions: tuple[str, ...]
    torch_version: str
    source: str = SOURCE

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; `schema` rises when a key changes its meaning."""
        found = {"schema": SCHEMA, **dataclasses.asdict(self)}
        found["flops"] |= {"model": self.flops.model, "total": self.flops.total}
        found["memory"]["hand_sum_bytes"] = self.memory.hand_sum_bytes
        return found

    def __str__(self) -> str:
        parameters = f"{format_count(self.num_parameters)} parameters"
        parts = [f"{self.name}, {parameters}, torch {self.torch_version}: {self.source}"]
        for header, rows, right in (
            memory_table(self.memory),
            flop_table(self.flops),
            module_table(self),
            unknown_table(self),
        ):
            if rows:
                parts.append(aligned(header, rows, right=right))
        return "\n\n".join((*parts, "\n".join(self.conventions)))
