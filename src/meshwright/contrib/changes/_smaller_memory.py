"""Suggest changes that make a step's memory smaller.

Suggestions use only settings and values that the configuration accepts. A saving in bytes is promised only
for the state, which divides exactly. Weighing again shows the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.compiler import Refusal
from meshwright.config import AXES, Layout, RunConfig, check_layout, overridden
from meshwright.contrib.fleet_plans import fleet_times
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import MemoryLedger
from meshwright.planning import Suggestion
from meshwright.units import format_bytes, format_count

ADAPTER_RANK = 16  # of the example in PEFT's documentation of LoRA
STATE = ("parameters", "frozen_parameters", "optimizer_state", "model_state")


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
