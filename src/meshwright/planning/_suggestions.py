"""Suggest changes that make a program smaller, using only settings and values that its configuration accepts.

A saving in bytes is promised only for the state, which divides exactly. Weighing again shows the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.config import AXES, Layout, RunConfig, check_layout
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import MemoryLedger
from meshwright.units import format_bytes

STATE = ("parameters", "optimizer_state", "model_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One change to what was weighed, and its effect; a field that is None or empty changes nothing."""

    effect: str
    fleet: str | None = None
    layout: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def arguments(self) -> str:
        """Command-line arguments of the change."""
        parts = [f"--on {self.fleet}"] if self.fleet else []
        parts += [f"--layout {self.layout}"] if self.layout else []
        return " ".join([*parts, *(f"--set {override}" for override in self.overrides)])


def suggestions(
    config: RunConfig | None, layout: Layout, fleet: Fleet, memory: MemoryLedger
) -> tuple[Suggestion, ...]:
    """Return changes that make `memory` smaller, the most needed first; none for a foreign program."""
    if config is None:
        return ()
    state = _state_suggestions(config, layout, fleet, memory)
    activations = _activation_suggestions(config, layout, fleet)
    state_bytes = sum(memory.by_category.get(name, 0) for name in STATE)
    room = (memory.usable_bytes or 0) - memory.allowance_bytes
    # If the state alone does not fit, no change to the activations helps.
    state_first = state_bytes > room or 2 * state_bytes > memory.reserved_bytes
    ordered = (state, activations) if state_first else (activations, state)
    return tuple(s for part in ordered for s in part)


def _state_suggestions(
    config: RunConfig, layout: Layout, fleet: Fleet, memory: MemoryLedger
) -> list[Suggestion]:
    """Suggest splitting parameters and moments further: over `data`'s devices, else over more devices."""
    state_bytes = sum(memory.by_category.get(name, 0) for name in STATE)
    replicas = layout.size("data")
    if replicas > 1:
        split = _with(layout, data=1, fsdp=layout.size("fsdp") * replicas)
        if _works(config, split):
            effect = (
                f"parameters and moments, {format_bytes(state_bytes)} here, are split over fsdp instead of "
                f"held by each of {replicas} replicas"
            )
            return [Suggestion(layout=str(split), effect=effect)]
    return _larger_fleet(config, layout, fleet, memory, state_bytes)


def _larger_fleet(
    config: RunConfig, layout: Layout, fleet: Fleet, memory: MemoryLedger, state_bytes: int
) -> list[Suggestion]:
    """Suggest the fewest doublings of the fleet after which the state takes at most half of a device's room.

    The room is the usable memory without the allowance.
    """
    room = (memory.usable_bytes or 0) - memory.allowance_bytes
    if room <= 0 or state_bytes <= 0:
        return []
    times = 2 ** max(1, math.ceil(math.log2(2 * state_bytes / room)))
    larger = _fleet_times(fleet, times)
    split = _with(layout, fsdp=layout.size("fsdp") * times)
    if larger is None or not _works(config, split):
        return []
    effect = (
        f"parameters and moments take {format_bytes(state_bytes / times)} of each device instead of "
        f"{format_bytes(state_bytes)}"
    )
    return [Suggestion(fleet=larger.name, layout=str(split), effect=effect)]


def _fleet_times(fleet: Fleet, times: int) -> Fleet | None:
    """Return a fleet of the same chip with `times` as many devices; None if none exists."""
    devices = fleet.num_devices * times
    if fleet.chip.slices is None:
        texts = [f"{devices}x{fleet.chip.name}"]
    else:
        per_device = fleet.chip.slices.cores_per_chip_in_name / fleet.chip.slices.devices_per_chip
        texts = [f"{fleet.chip.name}-{int(devices * per_device)}"]
    for text in texts:
        try:
            return Fleet.parse(text)
        except InputError:
            return None  # no slice or host has that size, so there is nothing to suggest
    return None


def _activation_suggestions(config: RunConfig, layout: Layout, fleet: Fleet) -> list[Suggestion]:
    """Suggest fewer sequences at once, fewer saved activations, and splitting each sequence's activations."""
    found: list[Suggestion] = []
    per_replica = config.batch.sequences // layout.num_replicas
    now = min(config.batch.microbatch_sequences or per_replica, per_replica)
    fewer = max((n for n in range(1, now // 2 + 1) if per_replica % n == 0), default=0)
    if fewer:
        effect = f"activations of {fewer} instead of {now} sequences at a time; the same step in more passes"
        found.append(Suggestion(overrides=(f"batch.microbatch_sequences={fewer}",), effect=effect))
    if config.model.has_blocks and config.remat != "full":
        effect = (
            f"keeps only each block's input for the backward pass (now: {config.remat}); more recomputation"
        )
        found.append(Suggestion(overrides=("remat=full",), effect=effect))
    if (split := _more_tensor(config, layout, fleet)) is not None:
        effect = "each sequence's activations and the logits are split over more devices; more messages"
        found.append(Suggestion(layout=str(split), effect=effect))
    return found


def _more_tensor(config: RunConfig, layout: Layout, fleet: Fleet) -> Layout | None:
    """Return the layout that moves most devices from fsdp to tensor in a fast domain; None if none works."""
    for times in (8, 4, 2):
        fsdp, rest = divmod(layout.size("fsdp"), times)
        tensor = layout.size("tensor") * times
        if rest == 0 and tensor <= fleet.chips_per_domain:
            split = _with(layout, fsdp=fsdp, tensor=tensor)
            if _works(config, split):
                return split
    return None


def _with(layout: Layout, **sizes: int) -> Layout:
    """Return the layout with these sizes and without axes of size 1.

    A new axis takes its place in the order of `AXES`, or the last place if the layout has another order.
    """
    merged = {**dict(layout.axes), **sizes}
    in_order = list(layout.names) == sorted(layout.names, key=AXES.index)
    names = sorted(merged, key=AXES.index) if in_order else list(merged)
    kept = tuple((name, merged[name]) for name in names if merged[name] != 1)
    return Layout(axes=kept or (("data", 1),))


def _works(config: RunConfig, layout: Layout) -> bool:
    try:
        check_layout(config, layout)
    except InputError:
        return False
    return True
