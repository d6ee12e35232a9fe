"""Track the tensor storages that are alive during a step, and sum them up in an account.

Only `account_of` imports torch. A storage counts once, with its exact bytes, from the operation that creates
it until it is freed.
Not counted: memory that a kernel allocates and frees within one operation; the rounding of CUDA's allocator,
which rounds each storage up to 512 bytes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._records import Account, FlopCount, MemoryCount, ModuleCount

TEMPORARY = "temporaries"
SAVED = "saved activations"
CATEGORIES = ("parameters", "buffers", "gradients", "optimizer state", "inputs", SAVED, TEMPORARY)


class _Storage:
    __slots__ = ("category", "format", "num_bytes", "reference", "saved_times")

    def __init__(self, reference: Any, num_bytes: int, number_format: str) -> None:
        self.reference = reference
        self.num_bytes = num_bytes
        self.format = number_format
        self.category = TEMPORARY
        self.saved_times = 0

    @property
    def counts_as(self) -> str:
        return SAVED if self.category == TEMPORARY and self.saved_times else self.category


class Storages:
    """All storages seen; `live` holds bytes by category now, and `at_peak` holds them at the peak."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}
        self.peak_phase = ""
        self._storages: dict[int, _Storage] = {}

    def see(self, tensor: Any, number_format: str) -> None:
        """Record a tensor's storage; if its size has changed, correct the count."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            reference = weakref.ref(storage, lambda _: self._freed(key))
            known = self._storages[key] = _Storage(reference, 0, number_format)
        if known.num_bytes != num_bytes:
            self._add(known, num_bytes - known.num_bytes)
            known.num_bytes = num_bytes

    def put(self, tensor: Any, category: str, number_format: str) -> None:
        """Set the category of a tensor's storage, unless it already has one."""
        self.see(tensor, number_format)
        known = self._storages[tensor.untyped_storage()._cdata]
        if known.category == TEMPORARY:
            self._change(known, category=category)
            known.format = number_format

    def save(self, tensor: Any, number_format: str) -> int:
        """Record that the forward pass keeps a tensor for the backward pass; return the key for `release`."""
        self.see(tensor, number_format)
        key = tensor.untyped_storage()._cdata
        self._change(self._storages[key], saved=1)
        return key

    def release(self, key: int) -> None:
        """Undo one `save`."""
        if key in self._storages:
            self._change(self._storages[key], saved=-1)

    def is_new(self, tensor: Any) -> bool:
        """Return True if the tensor's storage is not known yet."""
        return tensor.untyped_storage()._cdata not in self._storages

    def note_peak(self, phase: str) -> None:
        """Compare the live bytes with the peak so far."""
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak, self.peak_phase = self.live_bytes, dict(self.live), phase

    def add_to_peak(self, category: str) -> None:
        """Change the peak so far as if all current bytes of `category` had been alive then."""
        more = self.live[category] - self.at_peak.get(category, 0)
        self.peak_bytes += more
        self.at_peak[category] = self.live[category]

    def by_format(self) -> dict[str, dict[str, int]]:
        """Return the live bytes of each category by number format, without temporaries."""
        found: dict[str, dict[str, int]] = {}
        for storage in self._storages.values():
            if storage.counts_as != TEMPORARY and storage.num_bytes:
                formats = found.setdefault(storage.counts_as, {})
                formats[storage.format] = formats.get(storage.format, 0) + storage.num_bytes
        return found

    def _add(self, known: _Storage, num_bytes: int) -> None:
        self.live[known.counts_as] += num_bytes
        self.live_bytes += num_bytes

    def _change(self, known: _Storage, *, category: str | None = None, saved: int = 0) -> None:
        self._add(known, -known.num_bytes)
        known.category = category or known.category
        known.saved_times += saved
        self._add(known, known.num_bytes)

    def _freed(self, key: int) -> None:
        known = self._storages.pop(key)
        self._add(known, -known.num_bytes)


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
    """The facts of a run that neither the watch nor the storages hold."""

    module: Any
    device: str = "cpu"
    saved_activation_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_state_bytes: int = 0
    by_format: dict[str, dict[str, int]] = field(default_factory=dict)
    saved_by_module: Counter[str | None] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def account_of(seen: Seen, watch: Any, storages: Storages) -> Account:
    """Return the account of a step that `watch` and `storages` observed."""
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
    """Count each module with its children; work outside all modules is in no count."""
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
    """Return a path after its outer paths: "a.b" -> "", "a", "a.b"; empty for None, outside all modules."""
    if path is None:
        return []
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
