"""Suggest changes that make a step's memory smaller, and hold its comparison with the rule of thumb.

Suggestions use only settings and values that the configuration accepts. A saving in bytes is promised only
for the state, which divides exactly. Weighing again shows the others.

Imports: `compiler`, `config`, `errors`, `hardware`, `ledger`, `units`. No jax. Used by: `results`,
`report` and `api`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.compiler import Refusal
from meshwright.config import (
    AXES,
    Layout,
    RunConfig,
    check_layout,
    overridden,
)
from meshwright.errors import InputError
from meshwright.hardware import Fleet, Slices
from meshwright.ledger import MemoryLedger
from meshwright.units import format_bytes, format_count

ADAPTER_RANK = 16  # of the example in PEFT's documentation of LoRA
STATE = ("parameters", "frozen_parameters", "optimizer_state", "model_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One change to what was weighed, and its effect; a field that is None or empty changes nothing.

    `is_enough`: the saving is exact, and as large as what is too much.
    """

    effect: str
    fleet: str | None = None
    layout: str | None = None
    overrides: tuple[str, ...] = ()
    is_enough: bool = False

    @property
    def arguments(self) -> str:
        """Command-line arguments of the change."""
        parts = [Fleet.parse(self.fleet).options] if self.fleet else []
        parts += [f"--layout {self.layout}"] if self.layout else []
        return " ".join([*parts, *(f"--set {override}" for override in self.overrides)])


def suggestions(
    config: RunConfig | None, layout: Layout, fleet: Fleet, memory: MemoryLedger | Refusal
) -> tuple[Suggestion, ...]:
    """Return changes that make `memory` smaller, the most needed first; none for a foreign program.

    Args:
        memory: of the compiled step, or what its compiler said when it refused it.
    """
    if config is None:
        return ()
    if isinstance(memory, Refusal):
        held, needed, allowance = memory.argument_bytes_by_role, memory.needed_bytes, 0
    else:
        held, needed, allowance = memory.by_category, memory.reserved_bytes, memory.allowance_bytes
    state_bytes = sum(held.get(name, 0) for name in STATE)
    room = (memory.usable_bytes or 0) - allowance
    state = tuple(_state_suggestions(config, layout, fleet, state_bytes, room))
    activations = tuple(_activation_suggestions(config, layout, fleet))
    if state_bytes > room and (adapters := _adapter_suggestion(config)) is not None:
        state += (adapters,)
    moments, lacking = held.get("optimizer_state", 0), needed - room if memory.usable_bytes else 0
    if (waiting := _offload_suggestion(config, fleet, moments, lacking)) is not None:
        if waiting.is_enough:
            return (waiting, *state, *activations)
        state += (waiting,)
    # If the state alone does not fit, no change to the activations helps.
    state_first = state_bytes > room or 2 * state_bytes > needed
    return state + activations if state_first else activations + state


def _offload_suggestion(config: RunConfig, fleet: Fleet, moments: int, lacking: int) -> Suggestion | None:
    """Suggest that the moments wait in the hosts' memory; None if they do, or if there are none.

    Args:
        moments: their bytes on a device.
        lacking: the bytes that are too much; 0 if that is not known.
    """
    if not moments or config.waits("moments") or fleet.chip.platform == "cpu":
        return None
    is_enough = 0 < lacking <= moments
    effect = f"moments, {format_bytes(moments)} here, wait in the hosts' memory between steps"
    effect += "; the rest fits" if is_enough else ""
    value = "both" if config.offload == "activations" else "optimizer"
    return Suggestion(overrides=(f"offload={value}",), effect=effect, is_enough=is_enough)


def _adapter_suggestion(config: RunConfig) -> Suggestion | None:
    """Suggest adapters beside frozen parameters; None if the run has them, or its model takes none."""
    if config.lora.rank is not None:
        return None
    try:
        changed = overridden(config, [f"lora.rank={ADAPTER_RANK}"])
    except InputError:
        return None
    effect = (
        f"to fine-tune published weights: trains adapters of {format_count(changed.num_trained_parameters)} "
        "parameters; the others are frozen, without gradients and moments"
    )
    return Suggestion(overrides=(f"lora.rank={ADAPTER_RANK}",), effect=effect)


def _state_suggestions(
    config: RunConfig, layout: Layout, fleet: Fleet, state_bytes: int, room: int
) -> Iterator[Suggestion]:
    """Suggest splitting parameters and moments further: over `data`'s devices, else over more devices.

    The larger fleet has the fewest doublings after which the state takes at most half of a device's room, its
    usable memory without the allowance.
    """
    fsdp, replicas = layout.size("fsdp"), layout.size("data")
    held = format_bytes(state_bytes)
    if replicas > 1 and (split := _changed(config, layout, data=1, fsdp=fsdp * replicas)):
        effect = f"parameters and moments, {held} here, are split over fsdp instead of held by each of "
        yield Suggestion(layout=str(split), effect=f"{effect}{replicas} replicas")
    elif room > 0 and state_bytes > 0:
        times = 2 ** max(1, math.ceil(math.log2(2 * state_bytes / room)))
        larger, split = fleet_times(fleet, times), _changed(config, layout, fsdp=fsdp * times)
        if larger and split:
            left = format_bytes(state_bytes / times)
            effect = f"parameters and moments take {left} of each device instead of {held}"
            yield Suggestion(fleet=larger.name, layout=str(split), effect=effect)


def fleet_times(fleet: Fleet, times: int) -> Fleet | None:
    """Return a fleet of the same chip with `times` as many devices; None if none exists."""
    return _fleet_of_size(fleet, fleet.num_devices * times)


def smaller_fleets(largest: Fleet) -> list[Fleet]:
    """Return fleets of the same chip from the smallest up to `largest`: 1, 2, 3, 4, 6, 8, 12, 16 devices...

    Sizes that no host or slice of the chip has are left out. More devices than one slice of `largest`
    has are several of those.

    >>> [fleet.name for fleet in smaller_fleets(Fleet.parse("4xv5e-16"))]
    ['v5e-1', 'v5e-4', 'v5e-8', 'v5e-16', '2xv5e-16', '3xv5e-16', '4xv5e-16']
    >>> [fleet.name for fleet in smaller_fleets(Fleet.parse("24xH100"))]
    ['1xH100', '2xH100', '3xH100', '4xH100', '6xH100', '8xH100', '16xH100', '24xH100']
    """
    most = largest.num_devices
    powers = [2**power for power in range(most.bit_length())]
    sizes = sorted(size for size in {*powers, *(3 * power for power in powers)} if size < most)
    found = [_fleet_of_size(largest, size) for size in sizes]
    return [*(each for each in found if each), largest]


def _fleet_of_size(fleet: Fleet, num_devices: int) -> Fleet | None:
    """Return a fleet of that many devices, each as those of `fleet`, which a caller may have changed."""
    chip, price, reserve = fleet.chip, fleet.price_per_device_hour, fleet.reserve_bytes
    named = _catalog_fleet(fleet, num_devices)
    changed = {"chip": chip, "price_per_device_hour": price, "reserve_bytes": reserve}
    return named and dataclasses.replace(named, **changed)


def _catalog_fleet(fleet: Fleet, num_devices: int) -> Fleet | None:
    per_host, name = fleet.chips_per_host, f"{num_devices}x{fleet.chip.name}"
    if fleet.chip.slices is not None:
        return _slices_of_size(fleet, fleet.chip.slices, num_devices)
    if fleet.num_hosts > 1 and num_devices > per_host:
        if num_devices % per_host:
            return None
        name = f"{num_devices // per_host}x{per_host}x{fleet.chip.name}"
    try:
        return Fleet.parse(name)
    except InputError:
        return None  # no host has that size


def _slices_of_size(fleet: Fleet, slices: Slices, num_devices: int) -> Fleet | None:
    """Return one slice of a size, or several of the fleet's; None if neither exists.

    Several come first where the fleet has several.
    """
    slice_size = fleet.chips_per_domain
    count = num_devices // slice_size if num_devices % slice_size == 0 else 1
    for several in dict.fromkeys((1, count) if fleet.num_domains == 1 else (count, 1)):
        cores = num_devices // several * slices.cores_per_chip_in_name // slices.devices_per_chip
        try:
            return Fleet.parse(f"{several}x{fleet.chip.name}-{cores}")
        except InputError:
            continue
    return None


def _activation_suggestions(config: RunConfig, layout: Layout, fleet: Fleet) -> Iterator[Suggestion]:
    """Suggest fewer sequences at once, less saved, and smaller shards."""
    per_replica = config.batch.sequences // layout.num_replicas
    now = min(config.batch.microbatch_sequences or per_replica, per_replica)
    fewer = max((n for n in range(1, now // 2 + 1) if per_replica % n == 0), default=0)
    if fewer:
        effect = f"activations of {fewer} instead of {now} sequences at a time; the same step in more passes"
        yield Suggestion(overrides=(f"batch.microbatch_sequences={fewer}",), effect=effect)
    if config.model.has_blocks and config.remat != "full":
        effect = f"keeps only each block's input for the backward pass (now: {config.remat})"
        # Without a loop XLA begins work of many blocks at once, which costs most of what `full` saves.
        loop = ("layer_loop=keep",) if config.layer_loop == "unroll" else ()
        yield Suggestion(overrides=("remat=full", *loop), effect=f"{effect}; more recomputation")
    for times in (8, 4, 2):  # move most devices from fsdp to tensor in a fast domain
        fsdp, rest = divmod(layout.size("fsdp"), times)
        tensor = layout.size("tensor") * times
        if rest or tensor > fleet.chips_per_domain:
            continue
        if split := _changed(config, layout, fsdp=fsdp, tensor=tensor):
            effect = "each sequence's activations and the logits are split over more devices; more messages"
            yield Suggestion(layout=str(split), effect=effect)
            return


def _changed(config: RunConfig, layout: Layout, **sizes: int) -> Layout | None:
    """Return the layout with these sizes and without axes of size 1; None if the run cannot have it.

    A new axis takes its place in the order of `AXES`, or the last place if the layout has another order.
    """
    merged = {**dict(layout.axes), **sizes}
    in_order = list(layout.names) == sorted(layout.names, key=AXES.index)
    names = sorted(merged, key=AXES.index) if in_order else list(merged)
    kept = tuple((name, merged[name]) for name in names if merged[name] != 1)
    changed = Layout(axes=kept or (("data", 1),))
    try:
        check_layout(config, changed)
    except InputError:
        return None
    return changed


BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HandRow:
    """One quantity: hand-computed bytes on the fleet and on one device, and compiled bytes on one device."""

    quantity: str
    whole_bytes: int
    device_bytes: float
    compiled_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """The rule's counts of numbers over the whole fleet; `rule` says how activations were counted."""

    parameters: int
    activations: int
    gradients: int
    optimizer_state: int
    rule: str
    rows: tuple[HandRow, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes by the rule: 4 x (parameters + activations + gradients + optimizer state)."""
        return BYTES * (self.parameters + self.activations + self.gradients + self.optimizer_state)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, with the total."""
        return {**dataclasses.asdict(self), "total_bytes": self.total_bytes}
