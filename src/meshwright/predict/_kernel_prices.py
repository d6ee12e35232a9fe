"""Price what a program runs: the seconds of one kernel, and of one collective with the link that it uses.

Kernels. Priced by work: matmuls (dots in fusions, cuBLAS calls), cuDNN attention, and convolutions as the
equivalent matmul. Decompositions, linear systems and Fourier transforms take at least their FLOPs at the
peak, and at least their bytes; no rate of them is known, so that time is a lower bound and they are listed as
unpriced. Everything else is priced by the bytes that it reads and writes, of each memory at that memory's
rate: XLA's compiler for TPUs keeps arrays in the chip's vector memory, and its program says which. A kernel
that reads or writes the host's memory takes at least as long as those bytes on the host's link. Each
operand is read once, and each result is written once. A fusion that slices a stacked array reads one slice,
and one that updates a slice in place writes one: counting whole operands makes a scanned 7B step look 30 %
slower. Not modelled: the arithmetic of an elementwise fusion (on a GPU its bytes take longer), the host's
dispatch, caches, and operands that two arguments of a fusion share.

Collectives. Inside a fast domain the fitted tables are used. Across domains, as many of NCCL's rings as a
domain has network links pass through all devices, each over one link. Inside and between domains the bytes
move at once: the slower counts, plus one synchronisation for each domain beyond the first.
Not modelled: congestion, rail mismatch, SHARP.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.compiler import NamedKernel, Routing
from meshwright.errors import InputError
from meshwright.hlo import RUNNING, Array, Computation, Instruction, Program, Shape, iota_of, leaves_of
from meshwright.ledger import (
    EXCHANGES,
    FOURIER,
    LINEAR_ALGEBRA,
    Message,
    MultiplyAdds,
    crossing_bytes,
    instruction_work,
    is_ragged_call,
    left_dimensions,
    span_of,
    traced_kernel_of,
)

from ._formulas import attention_seconds, collective_seconds
from ._rate_files import runs
from ._rates import Machine

_VIEWS = ("bitcast", "reshape", "get-tuple-element")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the index of the operand that holds the new values


def bytes_by_memory(program: Program, computation: Computation, instruction: Instruction) -> Counter[int]:
    """Return the bytes that one run of a scheduled instruction reads plus those that it writes, by memory.

    Memories have XLA's numbers of memory spaces (`Array.memory_space`).
    """
    moved: Counter[int] = Counter()
    if instruction.custom_call_target in _MOVE_NOTHING:
        return moved
    operands, arrays = computation.operand_arrays(instruction), instruction.arrays
    if instruction.opcode == "fusion":
        called = program.called_by(instruction)[0]
        for parameter, operand in zip(called.parameters, instruction.operands, strict=True):
            moved[_memory_of(computation.operand_shape(operand))] += _read(program, called, parameter)
        for memory, num_bytes in _written(program, called, called.root, instruction.shape):
            moved[memory] += num_bytes
    elif instruction.opcode in _SLICES:
        moved[operands[0].memory_space] += instruction.num_bytes
        moved[arrays[0].memory_space] += instruction.num_bytes
    elif instruction.opcode in _UPDATES:
        update = computation.operand_shape(instruction.operands[_UPDATES[instruction.opcode]])
        moved[_memory_of(update)] += _new_bytes(computation, instruction)
        moved[_memory_of(instruction.shape)] += _new_bytes(computation, instruction)
    else:
        if instruction.opcode in ("broadcast", "iota"):
            operands = ()
        elif instruction.opcode == "copy-start":
            arrays = arrays[:1]  # the copy; the others are the original, and a context
        for array in (*operands, *arrays):
            moved[array.memory_space] += array.num_bytes
    return moved


def _memory_of(shape: Shape) -> int:
    return next((array.memory_space for array in leaves_of(shape)), 0)


def _new_bytes(computation: Computation, update: Instruction) -> int:
    operand = computation.operand_shape(update.operands[_UPDATES[update.opcode]])
    return sum(array.num_bytes for array in leaves_of(operand))


def _read(program: Program, computation: Computation, value: Instruction) -> int:
    """Return the bytes of `value` that its users in a fused computation read, at most its size."""
    needed, whole = 0, value.num_bytes
    for user in dict.fromkeys(computation.users[value.name]):
        for number, operand in enumerate(user.operands):
            if operand.name == value.name and needed < whole:
                needed += _read_by(program, computation, user, number, whole)
    return min(needed, whole)


def _read_by(program: Program, computation: Computation, user: Instruction, number: int, whole: int) -> int:
    if user.opcode in _VIEWS:
        return _read(program, computation, user)
    if user.opcode == "fusion":
        inner = program.called_by(user)[0]
        return _read(program, inner, inner.parameters[number])
    if number == 0 and user.opcode in _SLICES:
        return user.num_bytes
    if number == 0 and user.opcode == "scatter":
        return _new_bytes(computation, user)
    stays_in_place = number == 0 and user.opcode == "dynamic-update-slice"
    return 0 if stays_in_place or user.opcode == "tuple" else whole


def _written(
    program: Program, computation: Computation, value: Instruction, shape: Shape
) -> Iterator[tuple[int, int]]:
    """Yield memories and bytes that a fused computation writes for its result, or for a part of it.

    `shape`: of that part where the fusion is scheduled, whose layout names the memory.
    """
    if value.opcode == "tuple" and not isinstance(shape, Array):
        for operand, part in zip(value.operands, shape, strict=True):
            yield from _written(program, computation, computation.by_name[operand.name], part)
    elif value.opcode in ("tuple", "bitcast", "reshape"):
        for operand in value.operands:
            yield from _written(program, computation, computation.by_name[operand.name], shape)
    elif value.opcode in _UPDATES:
        yield _memory_of(shape), _new_bytes(computation, value)
    elif value.opcode == "fusion":
        inner = program.called_by(value)[0]
        yield from _written(program, inner, inner.root, shape)
    elif value.opcode != "parameter":  # a parameter is passed through unchanged
        yield _memory_of(shape), value.num_bytes


HOST_SPACE = 5
# A TPU's reads several arrays that lie one behind another as one; a buffer is made before it is filled.
_MOVE_NOTHING = ("ConcatBitcast", "AllocateBuffer")
EIGHT_BITS = "fp8"
SPLASH = "splash_mha"
"""The first part of the names of splash attention's kernels, which published runs on TPUs used as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One run of an instruction on the compute stream.

    `kind`: matmul | attention | convolution | linear algebra | fft | memory-bound | host-transfer. `flops`:
    FLOPs by the format in which they run. `unpriced`: arithmetic of which no rate is known, or in a format
    for which the chip has no known peak. `is_recomputed`: the backward pass runs it again.
    `memory_seconds`: in which it uses the main memory.
    """

    kind: str
    seconds: float
    flops: Counter[str]
    memory_seconds: float = 0.0
    unpriced: tuple[str, ...] = ()
    is_recomputed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """Hold the work of one run of an instruction on the compute stream, the same on every machine.

    `bytes_by_memory`: as the function of that name. `products`: each instruction inside that multiplies and
    adds, with its computation and its work.
    """

    bytes_by_memory: Mapping[int, int]
    products: tuple[tuple[Computation, Instruction, MultiplyAdds], ...]

    @property
    def vector_bytes(self) -> int:
        """Return the bytes on the chip, if the chip is a TPU."""
        return sum(n for space, n in self.bytes_by_memory.items() if space not in (0, HOST_SPACE))


def kernel_work(
    program: Program, computation: Computation, instruction: Instruction, continued: Collection[str] = ()
) -> KernelWork:
    """Return the work of one instruction that is neither a collective, nor a loop, nor free.

    `continued`: channels of collectives that a fusion here goes on with. Its own share of their bytes is not
    known, and they are counted where each begins and ends.
    """
    moved = bytes_by_memory(program, computation, instruction)
    if continued and instruction.opcode == "fusion":
        moved -= _bytes_of_channels(program, instruction, continued)
    return KernelWork(
        bytes_by_memory=moved,
        products=tuple(_works(program, computation, instruction)),
    )


def _bytes_of_channels(program: Program, fusion: Instruction, channels: Collection[str]) -> Counter[int]:
    """Return the bytes of the operands and results of collectives inside a fusion, by memory."""
    moved: Counter[int] = Counter()
    for home, inner in program.inside(fusion):
        if inner.collective and inner.attributes.get("channel_id", "") in channels:
            for array in (*home.operand_arrays(inner), *inner.arrays):
                moved[array.memory_space] += array.num_bytes
    return moved


def kernel_of(
    machine: Machine,
    program: Program,
    computation: Computation,
    instruction: Instruction,
    known: KernelWork | None = None,
) -> KernelTime:
    """Price one instruction that is neither a collective, nor a loop, nor free.

    `known`: its `kernel_work`, if the caller has it already.
    """
    doing = kernel_work(program, computation, instruction) if known is None else known
    vector_bytes = doing.vector_bytes if machine.is_tpu else 0
    host_bytes = doing.bytes_by_memory.get(HOST_SPACE, 0) if machine.host_bytes_per_second else 0
    host_seconds = host_bytes / (machine.host_bytes_per_second or math.inf)
    num_bytes = sum(doing.bytes_by_memory.values()) - vector_bytes - host_bytes
    memory_seconds = num_bytes / (machine.memory_bytes_per_second * machine.memory_efficiency)
    vector_seconds = vector_bytes / machine.vector_bytes_per_second
    seconds_by_kind: dict[str, float] = {}
    flops: Counter[str] = Counter()
    unpriced: list[str] = []
    for inner, place, work in doing.products:
        in_library = work.kind in (LINEAR_ALGEBRA, FOURIER)
        format_name = work.format if in_library else _running_format(machine, place, work.format)
        peak = machine.gemm_flops_per_second(format_name)
        if peak is None:
            unpriced.append(f"{work.kind} in {format_name}: {machine.name} has no known peak for it")
            continue
        flops[format_name] += work.flops
        kind = "matmul" if _is_product(place) else work.kind
        if (kernel := traced_kernel_of(place)) is not None:
            call = _TracedCall(
                computation=inner, place=place, kernel=kernel, format_name=format_name, peak=peak
            )
            seconds, unknown = _traced_seconds(machine, call, num_bytes)
            unpriced.extend(unknown)
        elif in_library:
            seconds = max(work.flops / peak, memory_seconds)
            words = "no rate of it is known, its least time is taken: its FLOPs at the peak, or its bytes"
            unpriced.append(f"{_library_words(inner, place)}: {words}")
        elif work.kind == "attention":
            seconds = _attention_seconds(machine, inner, place, work, format_name)
        else:
            narrowed = machine.narrow_products and work.format == "fp32"
            moved = num_bytes / (1 + narrowed)
            seconds = _product_seconds(machine, _sizes(inner, place, work), format_name, moved)
        seconds_by_kind[kind] = seconds_by_kind.get(kind, 0.0) + seconds
    if seconds_by_kind:
        kind = max(seconds_by_kind, key=seconds_by_kind.__getitem__)
        seconds = max(sum(seconds_by_kind.values()), vector_seconds)
    else:
        passes = _passes(instruction) if machine.is_tpu else 1
        kind, seconds = "memory-bound", passes * max(memory_seconds, vector_seconds)
    if host_seconds > seconds:
        kind, seconds = "host-transfer", host_seconds
    used = min(memory_seconds, seconds)
    return KernelTime(kind=kind, seconds=seconds, flops=flops, memory_seconds=used, unpriced=tuple(unpriced))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedCall:
    """A call of a traced kernel, the format that it computes in, and the peak FLOPs a second of that."""

    computation: Computation
    place: Instruction
    kernel: NamedKernel
    format_name: str
    peak: float


def _traced_seconds(machine: Machine, call: _TracedCall, num_bytes: int) -> tuple[float, list[str]]:
    """Return the seconds of a traced kernel, and in words what is not known of its rate on this machine."""
    kernel, format_name = call.kernel, call.format_name
    if kernel.name in runs()["grouped"]["shares"]:
        memory_seconds = num_bytes / (machine.memory_bytes_per_second * machine.memory_efficiency)
        seconds = max(_grouped_seconds(machine, call), memory_seconds)
        known_on: list[str] = [] if format_name.startswith(EIGHT_BITS) else runs()["grouped"]["chips"]
    else:
        seconds = _kernel_seconds(machine, kernel, format_name, call.peak, num_bytes)
        known_on = [machine.name] if machine.is_tpu and kernel.name.startswith(SPLASH) else []
    if machine.name in known_on:
        return seconds, []
    return seconds, [
        f"kernel {kernel.name}: no rate of it is known on {machine.name} in {format_name}, "
        f"it is priced as a {kernel.kind} of ours"
    ]


def _passes(instruction: Instruction) -> int:
    """Return how often an instruction reads and writes its arrays, at most.

    A sort without branches, as vector units need it, is a network of L (L + 1) / 2 stages for 2^L elements
    (Batcher 1968, "Sorting networks and their applications").
    """
    if instruction.opcode != "sort":
        return 1
    dimension = int(instruction.attributes.get("dimensions", "{0}").strip("{}"))
    levels = max(instruction.arrays[0].dims[dimension] - 1, 1).bit_length()
    return levels * (levels + 1) // 2


def _is_product(instruction: Instruction) -> bool:
    """Return whether a convolution is a matrix product, which XLA's compiler for TPUs writes as one."""
    return instruction.opcode == "convolution" and instruction.op_name.endswith("/dot_general")


def _library_words(computation: Computation, call: Instruction) -> str:
    """Return the name of a call of a library, or of a transform, with the shapes that it takes."""
    arrays = ", ".join(map(str, computation.operand_arrays(call)))
    return f"{call.custom_call_target or call.opcode}({arrays})"


def _works(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction, MultiplyAdds]]:
    """Yield each instruction inside that multiplies and adds, with its computation and its work.

    A dot that XLA rewrote as a `multiply` runs as elementwise arithmetic, so it is left out.
    """
    if instruction.opcode in RUNNING and instruction.called:
        for home, inner in program.inside(instruction):
            yield from _works(program, home, inner)
    elif instruction.opcode != "multiply":
        for work in instruction_work(program, computation, instruction):
            yield computation, instruction, work


def _running_format(machine: Machine, instruction: Instruction, format_name: str) -> str:
    """Return the format in which a product runs.

    A float32 product runs in the format that its `algorithm` names. Without an algorithm it runs in the
    machine's reduced format, unless its precision is `highest`.
    """
    if format_name == "fp32" and machine.narrow_products:
        return "bf16"
    if format_name == "fp32":
        algorithm = instruction.attributes.get("algorithm", "")
        if algorithm in ("dot_bf16_bf16_f32", "dot_tf32_tf32_f32"):
            format_name = algorithm.split("_")[1]
        elif "highest" not in _precision(instruction) and not algorithm:
            format_name = machine.matmul_of_fp32
    if machine.basis == "calibration" and format_name not in machine.peak_flops_per_second:
        return "fp32"  # XLA's CPU backend widens what the host has no instructions for
    return format_name


def _precision(instruction: Instruction) -> str:
    gemm: dict[str, Any] = {}
    if instruction.opcode == "custom-call" and instruction.custom_call_target.startswith("__cublas"):
        gemm = instruction.backend_config.get("gemm_backend_config", {})
    return f"{instruction.attributes.get('operand_precision', '')}{gemm.get('precision_config', '')}".lower()


def _sizes(
    computation: Computation, instruction: Instruction, work: MultiplyAdds
) -> tuple[float, float, float, float]:
    """Return batch, m, n and k such that 2 x batch x m x n x k is the work.

    A convolution has the sizes of the matmul that its implicit-GEMM kernel computes: n is the result's minor
    dimension.
    """
    result = instruction.arrays[0]
    if work.kind == "convolution" or instruction.opcode == "ragged-dot" or is_ragged_call(instruction):
        batch, n = 1, result.dims[-1] if result.dims else 1
        m = result.num_elements / n
    else:
        left = computation.operand_arrays(instruction)[0]
        batch, contracted = (
            math.prod(left.dims[d] for d in left_dimensions(instruction, kind))
            for kind in ("batch", "contracting")
        )
        m = left.num_elements / (batch * contracted)
        n = result.num_elements / (batch * m)
    return batch, m, n, work.flops / (2 * result.num_elements)


def head_size_of(computation: Computation, instruction: Instruction) -> int:
    """Return the width of the queries' heads of a call of cuDNN's attention."""
    return computation.operand_arrays(instruction)[0].dims[-1]


def _attention_seconds(
    machine: Machine, computation: Computation, instruction: Instruction, work: MultiplyAdds, format_name: str
) -> float:
    """Return the seconds of one attention call. `work` counts two matmuls forward and five backward."""
    config = instruction.backend_config["cudnn_fmha_backend_config"]
    head_size = head_size_of(computation, instruction)
    length = int(config["intermediate_tensor_shape"]["dimensions"][-1])
    backward = "Backward" in instruction.custom_call_target
    rate = machine.attention_rate(head_size, length, format_name, backward)
    peak = machine.peak_flops_per_second[format_name]
    return float(attention_seconds(rate, flops=work.flops, length=length, flops_per_second=peak))


def _kernel_seconds(
    machine: Machine, kernel: NamedKernel, format_name: str, peak: float, num_bytes: int
) -> float:
    """Return the seconds of a kernel of the user's or of a library: as cuDNN's attention, or as a product."""
    rate = machine.rates.gemm_for(format_name)
    if kernel.kind == "attention" and format_name in machine.peak_flops_per_second:
        attention = machine.attention_rate(
            kernel.head_size, kernel.length, format_name, kernel.recompute_flops > 0
        )
        peak = machine.peak_flops_per_second[format_name]
        return float(
            attention_seconds(attention, flops=kernel.flops, length=kernel.length, flops_per_second=peak)
        )
    memory = num_bytes / (machine.memory_bytes_per_second * rate.memory_efficiency)
    return max(kernel.flops / (peak * rate.efficiency), memory) + rate.start_seconds


def _product_seconds(
    machine: Machine, sizes: tuple[float, float, float, float], format_name: str, num_bytes: float
) -> float:
    """Return the seconds of a product of cuBLAS; of one with many matrices, as measured where it was.

    Equal buffers of experts reach less than large products do, the narrower they are, as our kernels do.
    """
    batch, m, n, k = sizes
    seconds = float(machine.product_seconds(format_name, m=m, n=n, k=k, batch=batch, num_bytes=num_bytes))
    rates, sustained = runs()["grouped"], machine.sustained_flops_per_second(format_name)
    if machine.name not in rates["chips"] or sustained is None:
        return seconds
    if batch == 1 or not rates["least"] <= min(m, n, k) < rates["wide"]:
        return seconds
    return max(seconds, 2 * batch * m * n * k / (rates["equal_buffers"] * sustained))


def _grouped_seconds(machine: Machine, call: _TracedCall) -> float:
    """Return the seconds of our grouped product of experts: by its share of what products sustain.

    The gradient of matrices writes more than products of its FLOPs do, which is added.
    """
    rates, result = runs()["grouped"], call.place.arrays[0]
    is_gradient = len(result.dims) > 2  # experts, inputs and outputs in any order, or rows and outputs
    *_, rows, other = call.computation.operand_arrays(call.place)
    narrow, wide = rates["shares"][call.kernel.name]
    sides = rows.dims[1], (other if is_gradient else result).dims[1]
    share = narrow if min(sides) < rates["wide"] else wide
    efficiency = machine.rates.gemm_for(call.format_name).efficiency
    sustained = machine.sustained_flops_per_second(call.format_name) or call.peak * efficiency
    written = result.num_bytes / (machine.memory_bytes_per_second * machine.memory_efficiency)
    return call.kernel.flops / (share * sustained) + (written if is_gradient else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One run of one collective: its name in reports, the link class that it keeps busy, and its time.

    `axes`: the mesh axes, such as "data,fsdp". Where the groups follow no axes, the group size in words.
    """

    name: str
    axes: str
    link: str  # inside | between
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of the mesh axes on the fleet that differs from the order in the program.

    `sizes`: the axis sizes in the program's order. `axes`: the indices of the axes in `sizes`, with the
    outermost axis on the fleet first.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]


def transfer_of(
    machine: Machine,
    message: Message,
    num_devices: int,
    order: Order | None = None,
    routing: Routing | None = None,
) -> Transfer:
    """Return the time of a message between the devices of its groups.

    Args:
        routing: sends the rows of experts' tokens once to each domain and device; None by choice.
        order: the placement of the program's devices on the fleet. None places them in the order of their
            numbers.

    Raises:
        InputError: the message crosses a link for which the catalog has no figure.
    """
    permute = message.kind == "collective-permute"
    places = None if order is None else _places(order)
    domains, members = span_of(message.groups, num_devices, machine.devices_per_domain, permute, places)
    where = ",".join(message.axes) if message.axes is not None else f"groups of {message.group_size}"
    name = f"{message.kind}[{where}]"
    size = message.group_size if domains == 1 else members
    sent = message.wire_bytes if domains == 1 else _inside_bytes(message, members)
    crossing = crossing_bytes(message, domains, members, slices=machine.is_tpu)
    if routing is not None and message.moves_tokens and message.kind == "all-to-all":
        from ._dispatch import copies_once

        row_bytes = message.payload_bytes / routing.num_chosen  # of all tokens, one row each
        sent, crossing = (row_bytes * copies for copies in copies_once(routing, domains, size))
    inside = 0.0
    if members > 1 or domains == 1:
        rate = machine.rates.collective_for(message.kind, size)
        link = _known(machine, machine.inside_rate(2 if permute else size), "inside a domain")
        inside = float(collective_seconds(rate, wire_bytes=sent, bytes_per_second=link))
    if domains == 1:
        return Transfer(name=name, axes=where, link="inside", seconds=inside)
    network = _known(machine, machine.between_bytes_per_second, "between domains")
    network *= machine.shared.network_efficiency
    between = crossing / network
    # NCCL's rings use both links at once. XLA reduces inside a TPU slice before it sends, or gathers after.
    at_once = not machine.is_tpu or message.kind in (*EXCHANGES, "collective-permute")
    seconds = max(inside, between) if at_once else inside + between
    seconds += machine.shared.network_alpha_seconds * (domains - 1)
    return Transfer(name=name, axes=where, link="between", seconds=seconds)


def _inside_bytes(message: Message, members: int) -> float:
    """Return the bytes that one device sends inside its domain when the group spans several domains."""
    if message.kind in EXCHANGES:
        return message.payload_bytes * (members - 1) / message.group_size
    return message.wire_bytes


@functools.cache
def _places(order: Order) -> tuple[int, ...]:
    """Return the place on the fleet of each of the program's devices."""
    places = [0] * math.prod(order.sizes)
    for place, device in enumerate(iota_of(order.sizes, order.axes)):
        places[device] = place
    return tuple(places)


def _known(machine: Machine, bytes_per_second: float | None, where: str) -> float:
    if bytes_per_second is None:
        raise InputError(
            f"the catalog has no figure for the link {where} of {machine.name}",
            hint="choose a fleet that is one fast domain, or a chip whose links are known",
        )
    return bytes_per_second
