"""Find what costs more than it needs to in a sharded program, each finding with its source line and a fix.

Looked for: large arguments that every device holds whole although an axis could split them; saved activations
that are identical on several devices although the batch could be divided among them; work that several
devices duplicate; arguments meant for host memory that the compiler keeps on the device; gathers whose result
is sliced again; gradients reduced in every microbatch; float32 matmuls among those in a narrower format; axes
that would fit in a host but leave it. Except for host memory, findings below 1 % of the device's memory, of
the step's FLOPs or of its traffic are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.compiler import Argument, Compiled
from meshwright.hardware import Fleet
from meshwright.hlo import Computation, Executions, Instruction, Program, module_of
from meshwright.units import format_bytes, format_rate

from ._records import Buffer, Collective, Finding, FlopLedger, MemoryLedger
from ._replication import Alike
from ._rules import work_of
from ._traffic import Message, message_of

SMALL_SHARE = 0.01
NARROW = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
SPLITTING_AXES = ("fsdp", "tensor", "expert", "stage")
KEPT = ("saved_activations", "logits_and_loss")
_Placed = tuple[Computation, Instruction, int]  # the number is how often it runs


def findings_of(
    executions: Executions,
    compiled: Compiled,
    fleet: Fleet,
    memory: MemoryLedger,
    flops: FlopLedger,
    traffic: tuple[Collective, ...],
) -> tuple[Finding, ...]:
    """Return all findings by kind, the kinds that tend to cost most first."""
    program = executions.program
    placed = [(each.computation, each.instruction, each.times) for each in executions]
    return (
        *_replicated_arguments(compiled, memory),
        *_replicated_activations(program, compiled, memory),
        *_alike(flops),
        *_kept_on_the_device(compiled.arguments, memory),
        *_undone_gathers(program, compiled, placed, traffic),
        *_reduced_each_microbatch(program, compiled, placed, traffic),
        *_float32_matmuls(program, compiled, placed, flops),
        *_axes_that_leave_the_host(compiled, fleet, traffic),
    )


def _replicated_arguments(compiled: Compiled, memory: MemoryLedger) -> Iterator[Finding]:
    splitting = [name for name, size in compiled.mesh_axes if size > 1 and name in SPLITTING_AXES]
    least = SMALL_SHARE * (memory.usable_bytes or memory.reserved_bytes)
    for argument in compiled.arguments:
        if splitting and argument.replicated and argument.device_bytes > least and argument.role != "batch":
            yield Finding(
                kind="replicated argument",
                what=f"{argument.path} {list(argument.shape)} lies whole on every device, "
                f"{format_bytes(argument.device_bytes)} each",
                source_line="",
                mend=f"split one of its dimensions over {' or '.join(splitting)}",
            )


def _replicated_activations(program: Program, compiled: Compiled, memory: MemoryLedger) -> Iterator[Finding]:
    """Yield findings on activations saved for the backward pass that are identical along a batch axis.

    A batch axis is one that splits an argument of the batch, or one along which the whole forward pass is
    identical. Other axes are not examined: along `tensor`, for example, whole activations between blocks are
    intended. Only values alive at the peak are examined.
    """
    least = SMALL_SHARE * (memory.usable_bytes or memory.reserved_bytes)
    kept = [b for b in memory.buffers if b.category in KEPT]
    if compiled.num_devices == 1 or sum(b.num_bytes for b in kept) <= least:
        return
    alike = Alike(program, compiled)
    found: dict[tuple[tuple[str, ...], str], list[Buffer]] = {}
    for buffer in kept:
        same = alike.along(*_place(buffer.name)) or ()
        gathered = tuple(name for name in same if name in alike.batch_axes)
        idle = tuple(name for name in same if name not in (*alike.batch_axes, *alike.forward_axes))
        if gathered or idle:  # an idle axis affects every line, so its buffers make one finding
            found.setdefault((gathered or idle, buffer.source_line if gathered else ""), []).append(buffer)
    for (axes, line), buffers in sorted(found.items(), key=lambda item: -_bytes(item[1])):
        if _bytes(buffers) <= least:
            continue
        split = all(name in alike.batch_axes for name in axes)
        others = sum(2 * b.num_bytes >= buffers[0].num_bytes for b in buffers) - 1  # small ones are left out
        more = f" and {others} more" if others else ""
        over = " and ".join(axes)
        yield Finding(
            kind="replicated activation",
            what=f"{buffers[0].shape}{more}, saved for the backward pass, is the same on every device along "
            f"{over}, {format_bytes(_bytes(buffers))} each",
            source_line=line or buffers[0].source_line,
            mend=f"pin its batch dimension to {over} there, or drop the constraint that gathers it"
            if split
            else f"split the batch over {over}, which divides nothing in the forward pass",
        )


def _bytes(buffers: list[Buffer]) -> int:
    return sum(buffer.num_bytes for buffer in buffers)


def _place(name: str) -> tuple[str, tuple[int, ...]]:
    """Split a buffer's name ("while.5{3}") into the instruction's name and the index in its tuple."""
    instruction, _, index = name.partition("{")
    return instruction, tuple(int(n) for n in index.rstrip("}").split(",") if n)


def _alike(flops: FlopLedger) -> Iterator[Finding]:
    for module, wasted in flops.waste_by_module.items():
        if wasted > SMALL_SHARE * flops.executed:
            yield Finding(
                kind="work done twice",
                what=f"{module or 'outside any scope'}: {format_rate(wasted, 'FLOP')} beyond the model's, "
                f"{100 * wasted / flops.executed:.1f} % of what is executed",
                source_line="",
                mend="split its operands over the axis whose devices do the same, or drop the padding: of "
                "experts, by a smaller capacity factor",
            )


def _kept_on_the_device(arguments: tuple[Argument, ...], memory: MemoryLedger) -> Iterator[Finding]:
    meant = sum(argument.device_bytes for argument in arguments if argument.host)
    if meant > memory.host_bytes:
        yield Finding(
            kind="offload that did not happen",
            what=f"{format_bytes(meant)} of arguments were meant for host memory, the compiler keeps "
            f"{format_bytes(memory.host_bytes)} there",
            source_line="",
            mend="move them inside the step with jax.device_put to a host memory space",
        )


def _undone_gathers(
    program: Program, compiled: Compiled, placed: list[_Placed], traffic: tuple[Collective, ...]
) -> Iterator[Finding]:
    least = SMALL_SHARE * sum(c.wire_bytes for c in traffic)
    for computation, instruction, times in placed:
        message = _message(computation, instruction, compiled)
        if message is None or message.kind != "all-gather" or times * message.wire_bytes <= least:
            continue
        users = _users(computation, _done(computation, instruction))
        if users and all(user.opcode in ("dynamic-slice", "reduce-scatter") for user in users):
            yield Finding(
                kind="gather that is undone",
                what=f"an all-gather over {_axes(message)} in {module_of(instruction.op_name) or 'the step'} "
                f"sends {format_rate(times * message.wire_bytes, 'B')}, and its result is cut up again",
                source_line=program.source_line(instruction),
                mend="pin the value before the gather and the one after it to the same sharding",
            )


def _reduced_each_microbatch(
    program: Program, compiled: Compiled, placed: list[_Placed], traffic: tuple[Collective, ...]
) -> Iterator[Finding]:
    least = SMALL_SHARE * sum(c.wire_bytes for c in traffic)
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for computation, instruction, times in placed:
        message = _message(computation, instruction, compiled)
        if message is None or message.kind not in ("all-reduce", "reduce-scatter") or message.axes is None:
            continue
        in_accumulation = "microbatches/while" in instruction.op_name and "transpose(" in instruction.op_name
        if in_accumulation and "data" in message.axes:
            key = (message.kind, _axes(message))
            sent, line = found.get(key, (0, program.source_line(instruction)))
            found[key] = (sent + times * message.wire_bytes, line)
    for (kind, axes), (sent, line) in found.items():
        if sent > least:
            yield Finding(
                kind="reduction inside the accumulation loop",
                what=f"an {kind} over {axes} in every microbatch sends {format_rate(sent, 'B')} a step",
                source_line=line,
                mend="fewer, larger microbatches: batch.microbatch_sequences; or fsdp in the place of data",
            )


def _float32_matmuls(
    program: Program, compiled: Compiled, placed: list[_Placed], flops: FlopLedger
) -> Iterator[Finding]:
    narrow = sum(count for name, count in flops.by_format.items() if name in NARROW)
    if narrow < flops.executed / 2:
        return  # float32 is intended
    found: dict[tuple[str, str], int] = {}
    for computation, instruction, times in placed:
        work = work_of(computation, instruction)
        if work is not None and work.format == "fp32":
            key = (module_of(instruction.op_name), program.source_line(instruction))
            found[key] = found.get(key, 0) + times * work.flops * compiled.num_devices
    for (module, line), wide in sorted(found.items(), key=lambda item: -item[1]):
        if wide > SMALL_SHARE * flops.executed:
            yield Finding(
                kind="matmul in float32",
                what=f"{module or 'outside any scope'}: {format_rate(wide, 'FLOP')} run in float32, "
                f"{100 * wide / flops.executed:.1f} % of the step",
                source_line=line,
                mend="cast both operands to the narrower format; keep float32 for the sums alone",
            )


def _axes_that_leave_the_host(
    compiled: Compiled, fleet: Fleet, traffic: tuple[Collective, ...]
) -> Iterator[Finding]:
    """Yield findings on axes that fit in a domain but send more between domains than another axis at all."""
    total = sum(c.wire_bytes for c in traffic)
    for name, size in compiled.mesh_axes:
        between = sum(c.wire_bytes for c in traffic if c.axes == (name,) and c.link == "between")
        if between <= SMALL_SHARE * total or fleet.chips_per_domain % size:
            continue
        inside = [n for n, s in compiled.mesh_axes if s > 1 and n != name]
        quieter = [n for n in inside if sum(c.wire_bytes for c in traffic if n in c.axes) < between]
        if quieter:
            yield Finding(
                kind="axis that leaves the host",
                what=f"{name}={size} fits in a domain of {fleet.chips_per_domain} devices, and sends "
                f"{format_rate(between, 'B')} a step between domains",
                source_line="",
                mend="take another order of the axes where the prediction, which walks them all, names one",
            )


def _message(computation: Computation, instruction: Instruction, compiled: Compiled) -> Message | None:
    return message_of(computation, instruction, compiled.mesh_axes)


def _axes(message: Message) -> str:
    return "+".join(message.axes) if message.axes else f"groups of {message.group_size}"


def _done(computation: Computation, start: Instruction) -> Instruction:
    """Return the instruction that holds the result: the `-done` of a start, else the instruction itself."""
    if not start.opcode.endswith("-start"):
        return start
    return next(u for u in _users(computation, start) if u.opcode.endswith("-done"))


def _users(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """Return the instructions that use a value, directly or through views of it."""
    found: list[Instruction] = []
    for user in computation.instructions:
        if any(operand.name == instruction.name for operand in user.operands):
            found += _users(computation, user) if user.opcode == "bitcast" else [user]
    return found
