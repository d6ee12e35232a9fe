"""Find what costs more than it needs to in a sharded program, each finding with its source line and a fix.

Looked for: large arguments that every device holds whole although an axis could split them; saved activations
that are identical on several devices although the batch could be divided among them; work that several
devices duplicate; arguments meant for host memory that the compiler keeps on the device; gathers whose result
is sliced again; gradients reduced in every microbatch; float32 matmuls among those in a narrower format;
experts of a width that no kernel takes; axes that would fit in a host but leave it; groups that straddle
hosts, racks or TPU slices. Except for host memory and for widths, findings below 1 % of the device's memory,
of the step's FLOPs or of its traffic are left out.

`Replication` finds the axes along which all devices hold the same value. Every value of the program gets the
set of axes along which devices may differ, starting from the shardings of the arguments. The result of an
operation may differ wherever one of its operands may. A gather or a reduction over an axis makes the result
identical along it. A scatter, an exchange or the device's own number makes it differ. Loops are followed
until the sets no longer change. If an axis is missing from a value's set, the value is certain to be
identical along it. If the axis is in the set, the value may still be identical. Each value also records
whether it depends on the batch, because masks and positions are identical by nature.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from meshwright.compiler import Argument, Compiled
from meshwright.hardware import KERNEL_CAPABILITY, KERNEL_WIDTH, Chip, Fleet
from meshwright.hlo import (
    COLLECTIVES,
    OTHER_EXCHANGES,
    Array,
    Axes,
    Computation,
    Execution,
    Executions,
    Instruction,
    Operand,
    Program,
    ProgramPhases,
    Shape,
    iota_of,
    module_of,
)
from meshwright.units import format_bytes, format_rate

from ._ledger_records import Buffer, Collective, Finding, FlopLedger, MemoryLedger
from ._traffic import Message, message_of
from ._work_rules import work_of

SCAN = "chunked_scan"  # the scope of mixers with a state, whose chunks take more products than a recurrence
SMALL_SHARE = 0.01
NARROW = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
SPLITTING_AXES = ("fsdp", "tensor", "expert", "stage")
JOINING_AXES = ("data", "stage")  # their messages between TPU slices are few, and run beside products
KEPT = ("saved_activations", "logits_and_loss")
_LOOPED = re.compile(r"/experts/(?:.*/)?needed_\d+_of_\d+/\w+/(?:closed_call/)?while/body/.*dot_general")


def findings_of(
    executions: Executions,
    compiled: Compiled,
    fleet: Fleet,
    memory: MemoryLedger,
    flops: FlopLedger,
    traffic: tuple[Collective, ...],
) -> tuple[Finding, ...]:
    """Return all findings by kind, the kinds that tend to cost most first."""
    messages = [
        (execution, message)
        for execution in executions
        if execution.instruction.collective
        and (message := message_of(execution.computation, execution.instruction, compiled.mesh_axes))
    ]
    small_bytes = SMALL_SHARE * (memory.usable_bytes or memory.reserved_bytes)
    sent_bytes = sum(c.wire_bytes for c in traffic)
    return (
        *_axes_between_slices(compiled.mesh_axes, fleet, traffic),
        *_groups_over_domains(compiled.mesh_axes, fleet, traffic, SMALL_SHARE * sent_bytes),
        *_replicated_arguments(compiled, small_bytes),
        *_replicated_activations(executions.program, compiled, memory, small_bytes),
        *_duplicated_work(flops, dict(compiled.mesh_axes)),
        *_kept_on_the_device(compiled.arguments, memory),
        *_undone_gathers(executions.program, messages, SMALL_SHARE * sent_bytes),
        *_reduced_each_microbatch(executions.program, messages, SMALL_SHARE * sent_bytes),
        *_products_of_split_matrices(executions, messages, compiled.num_devices, flops, sent_bytes),
        *_float32_matmuls(executions, compiled.num_devices, flops),
        *_looped_experts(executions, compiled.platform, fleet.chip),
        *_axes_that_leave_the_host(compiled.mesh_axes, fleet, traffic, SMALL_SHARE * sent_bytes),
    )


def _replicated_arguments(compiled: Compiled, small_bytes: float) -> Iterator[Finding]:
    splitting = [name for name, size in compiled.mesh_axes if size > 1 and name in SPLITTING_AXES]
    for argument in compiled.arguments:
        large = argument.device_bytes > small_bytes and argument.role != "batch"
        if splitting and argument.replicated and large:
            yield Finding(
                kind="replicated argument",
                what=f"{argument.path} {list(argument.shape)} is held whole by every device, "
                f"{format_bytes(argument.device_bytes)} each",
                source_line="",
                fix=f"split one of its dimensions over {' or '.join(splitting)}",
            )


def _replicated_activations(
    program: Program, compiled: Compiled, memory: MemoryLedger, small_bytes: float
) -> Iterator[Finding]:
    """Yield findings on activations saved for the backward pass that are identical along a batch axis.

    A batch axis is one that splits an argument of the batch, or one along which the whole forward pass is
    identical. Other axes are not examined: along `tensor`, for example, whole activations between blocks are
    intended. Only values alive at the peak are examined.
    """
    kept = [b for b in memory.buffers if b.category in KEPT]
    if compiled.num_devices == 1 or _bytes(kept) <= small_bytes:
        return
    replication = Replication(program, compiled)
    batch_axes, forward_axes = replication.batch_axes, replication.forward_axes
    groups: dict[tuple[tuple[str, ...], str], list[Buffer]] = {}
    for buffer in kept:
        instruction, _, index = buffer.name.partition("{")  # "while.5{3}"
        place = tuple(int(n) for n in index.rstrip("}").split(",") if n)
        same = replication.along(instruction, place) or ()
        gathered = tuple(name for name in same if name in batch_axes)
        idle = tuple(name for name in same if name not in (*batch_axes, *forward_axes))
        if gathered or idle:  # an idle axis affects every line, so its buffers make one finding
            groups.setdefault((gathered or idle, buffer.source_line if gathered else ""), []).append(buffer)
    for (axes, line), buffers in sorted(groups.items(), key=lambda item: -_bytes(item[1])):
        if _bytes(buffers) <= small_bytes:
            continue
        others = sum(2 * b.num_bytes >= buffers[0].num_bytes for b in buffers) - 1  # small ones are left out
        more = f" and {others} more" if others else ""
        over = " and ".join(axes)
        fix = f"split the batch over {over}, which divides nothing in the forward pass"
        if all(name in batch_axes for name in axes):
            fix = f"pin its batch dimension to {over} there, or drop the constraint that gathers it"
        yield Finding(
            kind="replicated activation",
            what=f"{buffers[0].shape}{more}, saved for the backward pass, is the same on every device along "
            f"{over}, {format_bytes(_bytes(buffers))} each",
            source_line=line or buffers[0].source_line,
            fix=fix,
        )


def _bytes(buffers: list[Buffer]) -> int:
    return sum(buffer.num_bytes for buffer in buffers)


def _duplicated_work(flops: FlopLedger, axes: Mapping[str, int]) -> Iterator[Finding]:
    for module, wasted in flops.waste_by_module.items():
        if wasted > SMALL_SHARE * flops.executed:
            heads = " (of key-value heads, by a smaller tensor)" if axes.get("tensor", 1) > 1 else ""
            experts = ": of experts, by more tokens in a microbatch" if "expert" in module else ""
            fix = f"split its operands over the axis whose devices do the same{heads}, or drop the "
            fix += f"padding{experts}"
            if module.rpartition("/")[2] == SCAN:
                fix = "take a smaller model.scan_chunk, with more rounds of a loop: chunks have this price"
            yield Finding(
                kind="work done twice",
                what=f"{module or 'outside any scope'}: {format_rate(wasted, 'FLOP')} beyond the model's, "
                f"{100 * wasted / flops.executed:.1f} % of what is executed",
                source_line="",
                fix=fix,
            )


def _kept_on_the_device(arguments: tuple[Argument, ...], memory: MemoryLedger) -> Iterator[Finding]:
    meant = sum(argument.device_bytes for argument in arguments if argument.host)
    if meant > memory.host_bytes:
        yield Finding(
            kind="offload that did not happen",
            what=f"{format_bytes(meant)} of arguments should be in host memory, but the compiler keeps "
            f"{format_bytes(memory.host_bytes)} there",
            source_line="",
            fix="move them inside the step with jax.device_put to a host memory space",
        )


_Messages = list[tuple[Execution, Message]]


def _undone_gathers(program: Program, messages: _Messages, least_bytes: float) -> Iterator[Finding]:
    for execution, message in messages:
        computation, instruction = execution.computation, execution.instruction
        sent = execution.times * message.wire_bytes
        if message.kind != "all-gather" or sent <= least_bytes:
            continue
        is_start = instruction.opcode.endswith("-start")
        users = _users(computation, computation.done_of(instruction) if is_start else instruction)
        if users and all(user.opcode in ("dynamic-slice", "reduce-scatter") for user in users):
            yield Finding(
                kind="gather that is undone",
                what=f"an all-gather over {_axes(message)} in {module_of(instruction.op_name) or 'the step'} "
                f"sends {format_rate(sent, 'B')}, and its result is cut up again",
                source_line=program.source_line(instruction),
                fix="pin the value before the gather and the one after it to the same sharding",
            )


def _reduced_each_microbatch(program: Program, messages: _Messages, least_bytes: float) -> Iterator[Finding]:
    reductions: dict[tuple[str, str], tuple[int, str]] = {}
    for execution, message in messages:
        path = execution.instruction.op_name
        in_accumulation = "microbatches/while" in path and "transpose(" in path
        reduces = message.kind in ("all-reduce", "reduce-scatter") and "data" in (message.axes or ())
        if in_accumulation and reduces:
            key = (message.kind, _axes(message))
            sent, line = reductions.get(key, (0, program.source_line(execution.instruction)))
            reductions[key] = (sent + execution.times * message.wire_bytes, line)
    for (kind, axes), (sent, line) in reductions.items():
        if sent > least_bytes:
            yield Finding(
                kind="reduction inside the accumulation loop",
                what=f"an {kind} over {axes} in every microbatch sends {format_rate(sent, 'B')} a step",
                source_line=line,
                fix="fewer, larger microbatches: batch.microbatch_sequences; or fsdp in the place of data",
            )


def _products_of_split_matrices(
    executions: Executions, messages: _Messages, num_devices: int, flops: FlopLedger, sent_bytes: float
) -> Iterator[Finding]:
    """Find an optimizer that multiplies matrices, as Muon does, and gathers them for each product.

    It is one if a hundredth of the FLOPs and a quarter of what is sent belong to neither the forward nor the
    backward pass. An optimizer that only gathers updated parameters, as under ZeRO-1, multiplies none.
    """
    phases = ProgramPhases(executions.program)

    def is_update(execution: Execution) -> bool:
        return phases.of(execution.computation, execution.instruction) in ("optimizer", "other")

    works = ((e, work_of(e.computation, e.instruction)) for e in executions if is_update(e))
    multiplied = sum(e.times * w.flops * num_devices for e, w in works if w is not None and w.format)
    if multiplied <= SMALL_SHARE * flops.executed:
        return
    found = [(e, m) for e, m in messages if m.kind in ("all-gather", "all-reduce") and is_update(e)]
    sent = sum(execution.times * message.wire_bytes for execution, message in found)
    if found and sent > sent_bytes / 4:
        largest, message = max(found, key=lambda each: each[0].times * each[1].wire_bytes)
        yield Finding(
            kind="products of split matrices in the optimizer",
            what=f"the optimizer multiplies matrices that {_axes(message)} splits: gathering them and "
            f"adding up the products sends {format_rate(sent, 'B')}, {sent / sent_bytes:.0%} of all",
            source_line=executions.program.source_line(largest.instruction),
            fix="deal whole matrices to the devices first, along the stack of layers: one exchange there and "
            "one back, as optimizer.kind = muon does here",
        )


def _float32_matmuls(executions: Executions, num_devices: int, flops: FlopLedger) -> Iterator[Finding]:
    narrow = sum(count for name, count in flops.by_format.items() if name in NARROW)
    if narrow < flops.executed / 2:
        return  # float32 is intended
    by_place: Counter[tuple[str, str]] = Counter()
    for execution in executions:
        instruction = execution.instruction
        work = work_of(execution.computation, instruction)
        if work is not None and work.format == "fp32":
            place = (module_of(instruction.op_name), executions.program.source_line(instruction))
            by_place[place] += execution.times * work.flops * num_devices
    for (module, line), wide in by_place.most_common():
        if wide > SMALL_SHARE * flops.executed:
            yield Finding(
                kind="matmul in float32",
                what=f"{module or 'outside any scope'}: {format_rate(wide, 'FLOP')} run in float32, "
                f"{100 * wide / flops.executed:.1f} % of the step",
                source_line=line,
                fix="cast both operands to the narrower format; keep float32 only for the sums",
            )


def _looped_experts(executions: Executions, platform: str, chip: Chip) -> Iterator[Finding]:
    """Yield a finding if a GPU multiplies experts of our models tile by tile in a loop, and why it does.

    The widths are those of one device, over which `tensor` may split the hidden units.
    """
    looped = [each for each in executions if platform == "cuda" and _LOOPED.search(each.instruction.op_name)]
    if not looped:
        return
    if chip.target is not None and chip.target.compute_capability < KERNEL_CAPABILITY:
        yield Finding(
            kind="experts in a loop",
            what=f"{chip.name} is older than Ampere, and the experts' kernels do not compile for it: "
            "a loop multiplies one tile of rows after another",
            source_line="",
            fix="use model.capacity_factor, whose buffers need no kernel",
        )
        return
    arrays = [array for each in looped for array in each.computation.operand_arrays(each.instruction)]
    widths = {size for array in arrays for size in array.dims[-2:] if size % KERNEL_WIDTH}
    for width in sorted(widths - {1}):
        near = [
            size for size in (width // KERNEL_WIDTH * KERNEL_WIDTH, -(-width // KERNEL_WIDTH) * KERNEL_WIDTH)
        ]
        yield Finding(
            kind="experts in a loop",
            what=f"the experts' matrices are {width} wide on a device, without a factor of {KERNEL_WIDTH}: a "
            "loop multiplies one tile of rows after another, where a kernel would multiply all at once",
            source_line="",
            fix=f"use a width of {' or '.join(str(size) for size in near if size)} on each device "
            "(model.mlp_dim, and the devices of `tensor`), or model.capacity_factor, whose buffers need none",
        )


def _axes_that_leave_the_host(
    mesh_axes: Axes, fleet: Fleet, traffic: tuple[Collective, ...], least_bytes: float
) -> Iterator[Finding]:
    """Yield findings on axes that fit in a domain but send more between domains than another axis at all."""
    if fleet.domain == "slice":
        return
    for name, size in mesh_axes:
        between = sum(c.wire_bytes for c in traffic if c.axes == (name,) and c.link == "between")
        if between <= least_bytes or fleet.chips_per_domain % size:
            continue
        others = [n for n, s in mesh_axes if s > 1 and n != name]
        if any(sum(c.wire_bytes for c in traffic if n in c.axes) < between for n in others):
            yield Finding(
                kind="axis that leaves the host",
                what=f"{name}={size} fits in a domain of {fleet.chips_per_domain} devices, and sends "
                f"{format_rate(between, 'B')} a step between domains",
                source_line="",
                fix="take another order of the axes where the prediction, which walks them all, names one",
            )


def _groups_over_domains(
    mesh_axes: Axes, fleet: Fleet, traffic: tuple[Collective, ...], least_bytes: float
) -> Iterator[Finding]:
    """Yield findings on axes whose groups fit in a domain, of which some lie in two: 64 in racks of 72."""
    domain, tray, chip, reach = fleet.chips_per_domain, fleet.chips_per_host, fleet.chip.name, 1
    if fleet.domain == "slice":
        return
    for name, size in reversed(mesh_axes):
        reach *= size
        sent = sum(c.wire_bytes for c in traffic if c.axes == (name,) and c.link == "between")
        if size == 1 or reach > domain or domain % reach == 0 or sent <= least_bytes:
            continue
        whole = [n for n in range(reach, domain, reach) if n % tray == 0 and fleet.num_devices % n == 0]
        mend = f"a size of {name} with which groups of devices divide {domain}"
        if fleet.domain == "rack" and whole:
            each = max(whole)
            mend = f"{each} devices of each rack: {fleet.num_devices // each}x{each}x{chip}; or {mend}"
        yield Finding(
            kind=f"group that straddles {fleet.domain}s",
            what=f"{domain} devices of a {fleet.domain} are no whole groups of {name}={size}: some lie in "
            f"two {fleet.domain}s, and a device sends {format_rate(sent, 'B')} a step over {name}",
            source_line="",
            fix=mend,
        )


def _axes_between_slices(mesh_axes: Axes, fleet: Fleet, traffic: tuple[Collective, ...]) -> Iterator[Finding]:
    """Yield findings on axes whose groups lie in several slices, without those that join slices cheaply.

    Of an axis of a foreign program, sums do not count: they may be those of gradients.
    """
    if fleet.domain != "slice" or fleet.num_domains == 1:
        return
    crossing = [each for each in traffic if each.crossing_bytes]
    stride, least_bytes = 1, SMALL_SHARE * sum(each.crossing_bytes or 0 for each in crossing)
    for name, size in reversed(mesh_axes):
        inside = min(size, max(1, fleet.chips_per_domain // stride))
        counts = [c for c in crossing if name in (*SPLITTING_AXES, "context") or c.kind != "all-reduce"]
        sent = sum(each.crossing_bytes or 0 for each in counts if name in each.axes)
        stride *= size
        if name in JOINING_AXES or inside == size or sent <= least_bytes:
            continue
        rest = size // inside
        within = f" before {name}={inside}" if inside > 1 else f", and {name} inside them"
        yield Finding(
            kind="group that straddles slices",
            what=f"each group of {name}={size} lies in {rest} slices, {inside} of it in each, and a device "
            f"sends {format_rate(sent, 'B')} a step between them",
            source_line="",
            fix=f"an axis over the batch of {rest}{within}, if that fits: then only gradients cross, once a "
            "step",
        )


def _axes(message: Message) -> str:
    return "+".join(message.axes) if message.axes else f"groups of {message.group_size}"


def _users(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """Return the instructions that use a value, directly or through views of it."""
    users: list[Instruction] = []
    for user in computation.users[instruction.name]:
        users += _users(computation, user) if user.opcode == "bitcast" else [user]
    return users


# A set of axes as bits in the mesh's order. The next higher bit says that the value depends on the batch.
AxisMasks = int | tuple["AxisMasks", ...]
_DEVICES = re.compile(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(.*)\}$")
_ANYTHING = frozenset(("partition-id", "replica-id", "rng", "infeed", "recv", "recv-done"))


class Replication:
    """Find the values of one program that are identical along mesh axes.

    `batch_axes`: axes that split an argument of the batch. `forward_axes`: axes along which any value that
    the forward pass computes from the batch may differ.
    """

    def __init__(self, program: Program, compiled: Compiled) -> None:
        self._program = program
        self._split = {argument.path: argument.axes for argument in compiled.arguments}
        self._mesh_axes = compiled.mesh_axes
        self._names = tuple(name for name, _ in compiled.mesh_axes)
        self._everywhere = (1 << len(self._names)) - 1
        self._batch = 1 << len(self._names)
        self._values: dict[str, AxisMasks] = {}
        self._results: dict[tuple[str, tuple[AxisMasks, ...]], AxisMasks] = {}
        self._forward = 0
        batch = _batch_arguments(program, compiled)
        arguments = tuple(
            self._argument(parameter, int(parameter.literal) in batch)
            for parameter in program.entry.parameters
        )
        self.batch_axes = self._axes(_union(arguments[number] for number in batch))
        self._computation(program.entry, arguments)
        self.forward_axes = self._axes(self._forward)

    def along(self, name: str, index: tuple[int, ...]) -> tuple[str, ...] | None:
        """Return the axes of more than one device along which all devices hold the same value.

        Return None for a value that is unknown or does not depend on the batch.
        """
        value = self._values.get(name)
        for place in index:
            if not isinstance(value, tuple):
                break
            value = value[place]
        if value is None or not (mask := _flat(value)) & self._batch:
            return None
        differing = self._axes(mask)
        return tuple(name for name, size in self._mesh_axes if size > 1 and name not in differing)

    def _axes(self, mask: int) -> tuple[str, ...]:
        return tuple(name for place, name in enumerate(self._names) if mask >> place & 1)

    def _mask(self, names: tuple[str, ...]) -> int:
        return sum(1 << self._names.index(name) for name in names)

    def _argument(self, parameter: Instruction, of_the_batch: bool) -> int:
        printed = parameter.attributes.get("sharding", "")
        # XLA of jaxlib 0.12 prints no sharding in the optimised program, so the requested one is used there.
        split = axes_of_sharding(printed, self._mesh_axes) if printed else self._split.get(parameter.op_name)
        mask = self._everywhere if split is None else self._mask(split)
        return mask | (self._batch if of_the_batch else 0)

    def _computation(self, computation: Computation, arguments: tuple[AxisMasks, ...]) -> AxisMasks:
        key = (computation.name, arguments)
        if key not in self._results:
            values: dict[str, AxisMasks] = {}
            for instruction in computation.instructions:
                value = self._value(computation, instruction, values, arguments)
                values[instruction.name] = value
                known = self._values.get(instruction.name)
                self._values[instruction.name] = value if known is None else _join(known, value)
                mask = _flat(value)
                if mask & self._batch and "jvp(" in instruction.op_name:
                    self._forward |= 0 if "transpose(" in instruction.op_name else mask
            self._results[key] = values[computation.root.name]
        return self._results[key]

    def _value(
        self,
        computation: Computation,
        instruction: Instruction,
        values: dict[str, AxisMasks],
        arguments: tuple[AxisMasks, ...],
    ) -> AxisMasks:
        opcode = instruction.opcode
        operands = [_picked(values, operand) for operand in instruction.operands]
        if opcode == "parameter":
            return arguments[int(instruction.literal)]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element" and isinstance(operands[0], tuple):
            return operands[0][int(instruction.attributes["index"])]
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._branches(instruction, operands)
        if opcode in ("fusion", "call"):
            return self._computation(self._program.called_by(instruction)[0], tuple(operands))
        if opcode.endswith("-done") and not instruction.all_called:
            started = computation.by_name[instruction.operands[0].name]
            return self._completed(computation, instruction, started, values)
        mask = _union(operands)
        if opcode in COLLECTIVES:
            return self._exchanged(computation, instruction, instruction.shape, operands)
        if opcode in OTHER_EXCHANGES or opcode in _ANYTHING:
            mask |= self._everywhere
        return _filled(instruction.shape, mask)

    def _completed(
        self, computation: Computation, done: Instruction, started: Instruction, values: dict[str, AxisMasks]
    ) -> AxisMasks:
        """Return the value that a `-done` completes.

        `-update` instructions may come before it, and bring operands that the start did not have (of gathers
        on a TPU's SparseCore).
        """
        later = list[AxisMasks]()
        while started.opcode.endswith("-update"):
            later = [*(_picked(values, operand) for operand in started.operands[1:]), *later]
            started = computation.by_name[started.operands[0].name]
        operands = [*(_picked(values, operand) for operand in started.operands), *later]
        if started.opcode == "async-start":
            return self._computation(self._program.called_by(started)[0], tuple(operands))
        if started.opcode.removesuffix("-start") in COLLECTIVES:
            return self._exchanged(computation, started, done.shape, operands)
        return _filled(done.shape, _union(operands))

    def _exchanged(
        self, computation: Computation, instruction: Instruction, shape: Shape, operands: list[AxisMasks]
    ) -> AxisMasks:
        message = message_of(computation, instruction, self._mesh_axes)
        masks = [_flat(operand) for operand in operands]
        if message is not None:
            masks = [self._after(message.kind, message.axes, message.group_size, mask) for mask in masks]
        if isinstance(shape, tuple) and len(shape) == len(masks):
            return tuple(_filled(part, mask) for part, mask in zip(shape, masks, strict=True))
        return _filled(shape, _union(masks))

    def _after(self, kind: str, axes: tuple[str, ...] | None, group_size: int, mask: int) -> int:
        if axes is None:  # groups that are not a block of the mesh may make any axis differ
            return mask | self._everywhere
        if kind not in ("all-gather", "all-reduce"):
            return mask | self._mask(axes)
        whole = math.prod(size for name, size in self._mesh_axes if name in axes) == group_size
        return mask & ~self._mask(axes) if whole else mask

    def _loop(self, loop: Instruction, state: AxisMasks) -> AxisMasks:
        body, condition = (self._program.computations[loop.called[key][0]] for key in ("body", "condition"))
        while True:
            goes_on = _flat(self._computation(condition, (state,))) & self._everywhere
            following = _with(_join(state, self._computation(body, (state,))), goes_on)
            if following == state:
                return state
            state = following

    def _branches(self, instruction: Instruction, operands: list[AxisMasks]) -> AxisMasks:
        branches = zip(self._program.called_by(instruction), operands[1:], strict=True)
        values = [self._computation(branch, (operand,)) for branch, operand in branches]
        return _with(functools.reduce(_join, values), _flat(operands[0]))


@functools.lru_cache(maxsize=10_000)
def axes_of_sharding(text: str, mesh_axes: Axes) -> tuple[str, ...] | None:
    """Return the mesh axes over which a sharding, as XLA prints it, splits an array; None where unknown."""
    if text == "{replicated}":
        return ()
    match = _DEVICES.match(text)
    if match is None:
        return None
    tiles, dims, order = (tuple(int(n) for n in (match[k] or "").split(",") if n) for k in (1, 2, 3))
    replicas = 1
    if "last_tile_dim_replicate" in match[4]:
        replicas = tiles[-1]
    elif "last_tile_dims" in match[4]:
        return None
    tile_of = {device: place // replicas for place, device in enumerate(iota_of(dims, order))}
    if len(tile_of) != math.prod(size for _, size in mesh_axes):
        return None
    splitting: list[str] = []
    stride = len(tile_of)
    for name, size in mesh_axes:
        stride //= size
        first = {device: device - device // stride % size * stride for device in tile_of}
        if any(tile_of[device] != tile_of[first[device]] for device in tile_of):
            splitting.append(name)
    return tuple(splitting)


def _batch_arguments(program: Program, compiled: Compiled) -> set[int]:
    """Return the numbers of the arguments that form the batch.

    Meshwright's own steps record them. In a foreign program they are the arguments for which the program
    returns no array of the same type and shape.
    """
    roles = {argument.path: argument.role for argument in compiled.arguments}
    if compiled.num_parameters is not None:
        return {int(p.literal) for p in program.entry.parameters if roles.get(p.op_name) == "batch"}
    given = Counter((a.dtype, a.dims) for a in program.entry.root.arrays)
    batch: set[int] = set()
    for parameter in program.entry.parameters:
        key = (parameter.arrays[0].dtype, parameter.arrays[0].dims)
        if given[key]:
            given[key] -= 1
        else:
            batch.add(int(parameter.literal))
    return batch


def _picked(values: dict[str, AxisMasks], operand: Operand) -> AxisMasks:
    value = values[operand.name]
    for place in operand.index:
        value = value[place] if isinstance(value, tuple) else value
    return value


def _flat(value: AxisMasks) -> int:
    return value if isinstance(value, int) else _union(value)


def _union(values: Iterable[AxisMasks]) -> int:
    return functools.reduce(lambda mask, value: mask | _flat(value), values, 0)


def _filled(shape: Shape, mask: int) -> AxisMasks:
    return mask if isinstance(shape, Array) else tuple(_filled(part, mask) for part in shape)


def _join(one: AxisMasks, other: AxisMasks) -> AxisMasks:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(_join(a, b) for a, b in zip(one, other, strict=True))
    return _flat(one) | _flat(other)


def _with(value: AxisMasks, mask: int) -> AxisMasks:
    return tuple(_with(part, mask) for part in value) if isinstance(value, tuple) else value | mask
