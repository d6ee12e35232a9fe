"""Count a run's memory by the rule of thumb, and say how the compiled program differs from it.

The rule of thumb is 4 x (parameters + activations + gradients + optimizer state). Source: Stanford's
CS336, lecture 2. Counted: everything in float32, one activation for each output of a layer (batch x width x
layers), and as many gradients as parameters. Not counted: the batch, logits and loss, gathered copies, what
layers keep in addition to their outputs, communication buffers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from meshwright.compiler import Argument, Compiled
from meshwright.config import Layout, RunConfig
from meshwright.ledger import Buffer, MemoryLedger
from meshwright.planning import BYTES, HandRow, RuleOfThumb
from meshwright.units import format_bytes

NONE_ALIVE = "none is alive at the peak"
COUNTED = ("parameters", "optimizer_state", "gradients", "saved_activations")


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
