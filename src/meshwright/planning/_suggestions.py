"""Suggest changes that make a step's memory smaller, and compare it with the rule of thumb.

Suggestions use only settings and values that the configuration accepts. A saving in bytes is promised only
for the state, which divides exactly. Weighing again shows the others.

The rule of thumb is 4 x (parameters + activations + gradients + optimizer state). Source: Stanford's
CS336, lecture 2. Counted: everything in float32, one activation for each output of a layer (batch x width x
layers), and as many gradients as parameters. Not counted: the batch, logits and loss, gathered copies, what
layers keep in addition to their outputs, communication buffers.

Imports: `compiler`, `config`, `errors`, `hardware`, `ledger`, `units`. No jax. Used by: `results`,
`report` and `api`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.compiler import Argument, Compiled, Refusal
from meshwright.config import (
    AXES,
    Layout,
    RunConfig,
    check_layout,
    overridden,
)
from meshwright.errors import InputError
from meshwright.hardware import Fleet, Slices
from meshwright.ledger import Buffer, MemoryLedger
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
NONE_ALIVE = "none is alive at the peak"
COUNTED = ("parameters", "optimizer_state", "gradients", "saved_activations")


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


def rule_of_thumb(config: RunConfig, compiled: Compiled, memory: MemoryLedger) -> RuleOfThumb:
    """Return the rule of thumb of a run; its rows compare it with the compiled program's bytes of one device.

    Every reason comes from the arguments' shards, the ledger's buffers and timeline, or the configuration.
    """
    parameters = config.num_trained_parameters
    sizes = config.model.sizes
    activations = config.batch.tokens_per_step * sizes.layer_outputs
    moments = _moments(config, compiled.arguments)
    total = 2 * parameters + activations + moments
    rows = _RuleRows(config, compiled, memory)
    return RuleOfThumb(
        parameters=parameters,
        activations=activations,
        gradients=parameters,
        optimizer_state=moments,
        rule=sizes.layer_outputs_rule,
        rows=(
            rows.held("parameters", parameters),
            rows.held("optimizer_state", moments),
            rows.gradients(parameters),
            rows.activations(activations),
            rows.rest(),
            rows.row("total", BYTES * total, memory.reserved_bytes, ""),
        ),
    )


def _moments(config: RunConfig, arguments: Sequence[Argument]) -> int:
    """Count the numbers of optimizer state: for most optimizers, a fixed count for each parameter.

    Adafactor and Muon treat matrices differently and have no rule of thumb. For them, count the state that
    the step takes.
    """
    if (alike := config.optimizer.kept_alike) is not None:
        return alike * config.num_trained_parameters
    formats = "float32", "bfloat16", "uint8"
    held = [a for a in arguments if a.role == "optimizer_state" and a.dtype in formats]
    return sum(math.prod(argument.shape) for argument in held)


class _RuleRows:
    """Build the rows of one run."""

    def __init__(self, config: RunConfig, compiled: Compiled, memory: MemoryLedger) -> None:
        self._config, self._memory = config, memory
        self._layout, self._devices = Layout(axes=compiled.mesh_axes), compiled.num_devices
        self._arguments = compiled.arguments

    def held(self, role: str, count: int) -> HandRow:
        """Return the row of a role that arguments hold for the whole step: parameters or moments."""
        compiled = self._memory.by_category.get(role, 0)
        arrays = [a for a in self._arguments if a.role == role and a.shape]
        step_counts = sum(a.device_bytes for a in self._arguments if a.role == role and not a.shape)
        why = _where(arrays, self._layout) if count else "the optimizer keeps none"
        for dtype, words in (("bfloat16", "bf16"), ("uint8", "8 bits")):
            if any(a.dtype == dtype for a in arrays):
                why += f", in {words} where the rule counts fp32"
        if step_counts:
            why += f", {'and' if count else 'but'} {step_counts} bytes of step counts"
        if lost := step_counts + sum(a.device_bytes for a in arrays) - compiled:
            why += f"; at the peak {format_bytes(lost)} of their place hold other values or none"
        return self.row(role, BYTES * count, compiled, why)

    def gradients(self, count: int) -> HandRow:
        kept, compiled = self._alive("gradients")
        arrays = [a for a in self._arguments if a.role == "parameters"]
        words = [f"{_arrays(kept)}, for {len(arrays)} arrays of parameters" if kept else NONE_ALIVE]
        parts = {a.device_bytes // BYTES for a in arrays}
        wholes = {math.prod(a.shape) for a in arrays} - parts
        if whole := sum(_num_elements(buffer) in wholes for buffer in kept):
            words.append(f"{whole} as large as a whole parameter, of which a device holds a part")
        # Compare with a full set, split as the parameters are, in the narrowest format of any gradient.
        narrowest = BYTES if self._config.precision == "fp32" else 2
        most = max(self._memory.timeline.by_category.get("gradients", (0,)))
        if not most:
            words = ["no value of the step is filed as a gradient"]
        elif most < sum(a.device_bytes for a in arrays) * narrowest // BYTES:
            words.append(f"never all at once: at most {format_bytes(most)} are filed so at any instant")
        return self.row("gradients", BYTES * count, compiled, "; ".join(words))

    def activations(self, count: int) -> HandRow:
        kept, compiled = self._alive("saved_activations")
        words = [_arrays(kept) if kept else NONE_ALIVE]
        most = max(self._memory.timeline.by_category.get("saved_activations", (0,)))
        if most > compiled:
            words.append(f"up to {format_bytes(most)} at another instant")
        batch, taken = self._config.batch, self._config.model.takes
        replicas = self._layout.num_replicas
        share = batch.sequences // replicas
        if replicas < self._devices:
            words.append(f"{taken} are split {replicas} ways over {self._devices} devices")
        if batch.microbatch_sequences is not None and batch.microbatch_sequences < share:
            words.append(f"{batch.microbatch_sequences} of {share} {taken} at a time")
        if kept and self._config.remat != "none":
            words.append(f"rematerialisation {self._config.remat}")
        if compiled > BYTES * count / self._devices:
            words.append("whatever the backward pass needs counts, not outputs of layers alone")
        return self.row("activations", BYTES * count, compiled, "; ".join(words))

    def _alive(self, category: str) -> tuple[list[Buffer], int]:
        """Return the buffers of a category at the peak, largest first, and the category's bytes."""
        kept = [b for b in self._memory.buffers if b.category == category and b.num_bytes]
        return kept, self._memory.by_category.get(category, 0)

    def rest(self) -> HandRow:
        """Return the row of everything that the rule leaves out, naming its largest parts."""
        others = {name: size for name, size in self._memory.by_category.items() if name not in COUNTED}
        first = list(others.items())[:3]
        largest = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in first]
        why = f"not in the rule: {', '.join(largest)}" if largest else "nothing"
        return self.row("everything else", 0, sum(others.values()), why)

    def row(self, quantity: str, whole: int, compiled: int, why: str) -> HandRow:
        return HandRow(
            quantity=quantity.replace("_", " "),
            whole_bytes=whole,
            device_bytes=whole / self._devices,
            compiled_bytes=compiled,
            why=why,
        )


def _where(arrays: Sequence[Argument], layout: Layout) -> str:
    """Describe how many devices hold each number of the arrays, by share of bytes where arrays differ."""
    devices, bytes_by_ways = layout.num_devices, Counter[int]()
    if devices == 1:
        return "one device holds all of it"
    for array in arrays:
        whole = BYTES * math.prod(array.shape)
        bytes_by_ways[whole // array.device_bytes] += whole
    splitting = [(name, size) for name, size in layout.axes if name != "data" and size > 1]
    words: list[str] = []
    for ways, num_bytes in bytes_by_ways.most_common():
        place = f"each number is stored on {devices // ways} of {devices} devices"
        how = f"split {ways} ways" if ways > 1 else "not split"
        if ways > 1 and ways == math.prod(size for _, size in splitting):
            how = f"split over {' and '.join(f'{name}={size}' for name, size in splitting)}"
        share = f"{100 * num_bytes / bytes_by_ways.total():.1f} % " if len(bytes_by_ways) > 1 else ""
        words.append(f"{share}{how}: {place}")
    return ", ".join(words)


def _arrays(buffers: Sequence[Buffer]) -> str:
    """Describe the number of buffers, the shape of the largest, and the other buffers' formats."""
    others = sorted({buffer.format for buffer in buffers} - {buffers[0].format})
    if len(buffers) == 1:
        return f"one array at the peak, {buffers[0].shape}"
    largest = f"{len(buffers)} arrays at the peak, the largest {buffers[0].shape}"
    return f"{largest}, some in {' and '.join(others)}" if others else largest


def _num_elements(buffer: Buffer) -> int:
    """Return the number of elements of a buffer's shape, such as "f32[64,64]"."""
    inside = buffer.shape.partition("[")[2].partition("]")[0]
    return math.prod(int(size) for size in inside.split(",") if size)
