"""The sum that people make by hand, 4 x (parameters + activations + gradients + optimizer state), beside what
the compiler allocates, with the reason for each difference.

The rule is that of Stanford's CS336, lecture 2: everything in float32, one activation for each output of a
layer (batch x width x layers), as many gradients as parameters. Not counted by it: the batch, logits and
loss, gathered copies, what layers keep beside their outputs, communication buffers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from meshwright.config import (
    AdaGradOptimizer,
    AdamWOptimizer,
    CruncherModel,
    Layout,
    LeNetModel,
    LinearModel,
    RunConfig,
)
from meshwright.ledger import MemoryLedger
from meshwright.units import format_bytes

BYTES = 4
COUNTED = ("parameters", "optimizer_state", "gradients", "saved_activations")
# Outputs of LeNet's layers for one image, but for the last: two convolutions and the hidden layer.
LENET_ACTIVATIONS = 20 * 26 * 26 + 50 * 9 * 9 + 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HandRow:
    """One quantity: bytes by hand, on the whole fleet and on one device, and what is compiled there."""

    quantity: str
    whole_bytes: int
    device_bytes: float
    compiled_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandSum:
    """Numbers of the whole fleet as the rule counts them; `rule` says how activations were counted."""

    parameters: int
    activations: int
    gradients: int
    optimizer_state: int
    rule: str
    rows: tuple[HandRow, ...]

    @property
    def total_bytes(self) -> int:
        """4 x (parameters + activations + gradients + optimizer state)."""
        return BYTES * (self.parameters + self.activations + self.gradients + self.optimizer_state)

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types, with the total."""
        return {**dataclasses.asdict(self), "total_bytes": self.total_bytes}


def hand_sum(config: RunConfig, layout: Layout, num_devices: int, memory: MemoryLedger) -> HandSum:
    """The hand sum of a run, and its rows beside the compiled program's bytes of one device."""
    parameters = config.model.num_parameters
    activations, rule = _activations(config)
    moments = parameters * _moments(config)
    counts = {
        "parameters": parameters,
        "activations": activations,
        "gradients": parameters,
        "optimizer_state": moments,
    }
    rows = _Rows(config, layout, num_devices, memory)
    return HandSum(
        **counts,
        rule=rule,
        rows=(
            rows.held("parameters", parameters),
            rows.held("optimizer_state", moments),
            rows.gradients(parameters),
            rows.activations(activations),
            rows.rest(),
            rows.total(sum(counts.values())),
        ),
    )


def _activations(config: RunConfig) -> tuple[int, str]:
    model, rows = config.model, config.batch.sequences
    if isinstance(model, LinearModel):
        return 0, "no layer before the output, so no activation"
    if isinstance(model, CruncherModel):
        return rows * model.width * model.num_layers, "batch x width x layers"
    if isinstance(model, LeNetModel):
        return rows * LENET_ACTIVATIONS, "images x outputs of the two convolutions and the hidden layer"
    tokens = config.batch.tokens_per_step
    return tokens * model.embed_dim * model.num_layers, "tokens x width x layers: one output of each block"


def _moments(config: RunConfig) -> int:
    match config.optimizer:
        case AdamWOptimizer():
            return 2
        case AdaGradOptimizer():
            return 1
        case sgd:
            return int(sgd.momentum > 0)


class _Rows:
    """The rows of one run."""

    def __init__(self, config: RunConfig, layout: Layout, num_devices: int, memory: MemoryLedger) -> None:
        self._config, self._layout, self._devices, self._memory = config, layout, num_devices, memory

    def held(self, category: str, count: int) -> HandRow:
        """What lies in arguments for the whole step: parameters, moments."""
        compiled = self._memory.by_category.get(category, 0)
        whole = BYTES * count
        if not count:
            why = "the optimizer keeps none" + (f", but {compiled} bytes of step counts" if compiled else "")
        else:
            times = compiled * self._devices / whole
            splits = [f"{name}={size}" for name, size in self._layout.axes if name != "data" and size > 1]
            why = f"{'split over ' + ' and '.join(splits) if splits else 'not split'}: each number lies on "
            why += f"{max(round(times), 1)} of {self._devices} devices" if self._devices > 1 else "the device"
            if times < 0.999 * max(round(times), 1):
                why += "; at the peak a part of their place is used otherwise, or idle"
        return self._row(category, whole, compiled, why)

    def gradients(self, count: int) -> HandRow:
        compiled, whole = self._memory.by_category.get("gradients", 0), BYTES * count
        here = self._memory.by_category.get("parameters", 0)  # what all gradients take, split as parameters
        if compiled < here:
            why = "at the peak the others are not made yet, or applied already"
        elif compiled == here:
            why = "all of them at the peak, split as the parameters are"
        else:
            times = compiled / max(here, 1)
            why = f"{times:.3g} times one set, split as the parameters are: some have several forms"
        return self._row("gradients", whole, compiled, why)

    def activations(self, count: int) -> HandRow:
        compiled = self._memory.by_category.get("saved_activations", 0)
        kept = [b for b in self._memory.buffers if b.category == "saved_activations"]
        formats = {buffer.format for buffer in kept if buffer.num_bytes > 0.01 * compiled}
        words = [f"kept in {' and '.join(sorted(formats))}"] if formats else ["none is alive at the peak"]
        batch = self._config.batch
        replicas = self._layout.size("data") * self._layout.size("fsdp")
        share = batch.sequences // replicas
        if batch.microbatch_sequences is not None and batch.microbatch_sequences < share:
            words.append(f"{batch.microbatch_sequences} of {share} sequences at a time")
        if kept and self._config.remat != "none":
            words.append(f"rematerialisation {self._config.remat}")
        if kept and count:
            words.append("whatever else the backward pass needs counts too")
        return self._row("activations", BYTES * count, compiled, "; ".join(words))

    def rest(self) -> HandRow:
        """What the rule leaves out, by its largest parts."""
        others = {name: size for name, size in self._memory.by_category.items() if name not in COUNTED}
        largest = [
            f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in list(others.items())[:3]
        ]
        why = f"not in the rule: {', '.join(largest)}" if largest else "nothing"
        return self._row("everything else", 0, sum(others.values()), why)

    def total(self, count: int) -> HandRow:
        return self._row("total", BYTES * count, self._memory.reserved_bytes, "")

    def _row(self, quantity: str, whole: int, compiled: int, why: str) -> HandRow:
        return HandRow(
            quantity=quantity.replace("_", " "),
            whole_bytes=whole,
            device_bytes=whole / self._devices,
            compiled_bytes=compiled,
            why=why,
        )
