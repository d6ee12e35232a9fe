"""From what was seen of a step to its record. No torch is imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._records import Account, FlopCount, MemoryCount, ModuleCount
from ._storages import TEMPORARY, Storages

ALWAYS = (
    "FLOPs are of matrix products, convolutions, attention and recurrent layers; a multiply-add is two. "
    "Elementwise work and reductions count none; a convolution's products with padding count.",
    "Causal attention in one operation counts the pairs of positions that may meet; a mask that is a tensor, "
    "and attention written as matrix products, count whole.",
    "Bytes are those of the storages. The peak is of a step after the first, the output lives until its end, "
    "and what a kernel takes for itself is not seen.",
)


@dataclass(slots=True)
class Seen:
    """What the run of a step adds to the watch and the storages."""

    module: Any
    device: str = "cpu"
    saved_activation_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_state_bytes: int = 0
    by_format: dict[str, dict[str, int]] = field(default_factory=dict)
    saved_by_module: Counter[str | None] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def account_of(seen: Seen, watch: Any, storages: Storages) -> Account:
    """The record of a step that `watch` and `storages` saw."""
    import torch

    modules = dict(seen.module.named_modules())
    notes = list(seen.notes)
    if "aten._cudnn_rnn" in watch.by_operation:
        notes.append(
            "What cuDNN keeps of recurrent layers for the backward pass is of unknown size: not counted."
        )
    elif any(isinstance(child, torch.nn.LSTM) for child in modules.values()):
        notes.append("LSTM layers run step by step, not by oneDNN, which keeps a workspace of unknown size.")
    notes.append(
        f"Kernels of attention and loops of the optimizer are those that PyTorch chooses for {seen.device}."
    )
    return Account(
        name=type(seen.module).__name__,
        num_parameters=sum(parameter.numel() for parameter in seen.module.parameters()),
        flops=_flops(watch),
        memory=_memory(seen, storages),
        by_module=_by_module(modules, watch.flops, seen.saved_by_module),
        unknown=dict(sorted(watch.unknown.items())),
        conventions=(*notes, *ALWAYS),
        torch_version=torch.__version__,
    )


def _flops(watch: Any) -> FlopCount:
    by_phase: Counter[str] = Counter()
    for (phase, _), count in watch.flops.items():
        by_phase[phase] += count
    return FlopCount(
        forward=by_phase["forward"],
        backward=by_phase["backward"] + by_phase["recomputed"],
        recomputed=by_phase["recomputed"],
        optimizer=by_phase["optimizer"],
        by_operation=dict(watch.by_operation.most_common()),
        by_format=dict(watch.by_format.most_common()),
    )


def _memory(seen: Seen, storages: Storages) -> MemoryCount:
    return MemoryCount(
        parameters_bytes=storages.live["parameters"],
        buffers_bytes=storages.live["buffers"],
        gradients_bytes=seen.gradients_bytes,
        optimizer_state_bytes=seen.optimizer_state_bytes,
        inputs_bytes=storages.live["inputs"],
        saved_activation_bytes=seen.saved_activation_bytes,
        temporary_peak_bytes=storages.at_peak.get(TEMPORARY, 0),
        peak_bytes=storages.peak_bytes,
        peak_phase=storages.peak_phase,
        at_peak={name: size for name, size in storages.at_peak.items() if size},
        by_format=seen.by_format,
    )


def _by_module(
    modules: Mapping[str, Any], flops: Mapping[tuple[str, str | None], int], saved: Mapping[str | None, int]
) -> tuple[ModuleCount, ...]:
    """Each module with what its children cost; what ran outside of all modules is in none."""
    sums: Counter[tuple[str, str]] = Counter()
    for (phase, path), count in flops.items():
        for outer in _with_outer(path):
            sums[phase, outer] += count
    for path, size in saved.items():
        for outer in _with_outer(path):
            sums["saved", outer] += size
    return tuple(
        ModuleCount(
            path=path,
            kind=type(module).__name__,
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            forward_flops=sums["forward", path],
            backward_flops=sums["backward", path] + sums["recomputed", path],
            recomputed_flops=sums["recomputed", path],
            saved_activation_bytes=sums["saved", path],
        )
        for path, module in modules.items()
    )


def _with_outer(path: str | None) -> list[str]:
    """ "a.b" -> "", "a", "a.b"; nothing for None, which is outside of all modules."""
    if path is None:
        return []
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
