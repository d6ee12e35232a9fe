"""Estimate the seconds of one instruction of the compute stream from its work and its bytes.

Priced by work: matmuls (dots in fusions, cuBLAS calls), cuDNN attention, and convolutions as the equivalent
matmul. Everything else is priced by the bytes of device memory that it reads and writes. Each operand is read
once, and each result is written once. A fusion that slices a stacked array reads one slice, and one that
updates a slice in place writes one: counting whole operands makes a scanned 7B step look 30 % slower.
Not modelled: the arithmetic of an elementwise fusion (on a GPU its bytes take longer), the host's dispatch,
caches, and operands that two arguments of a fusion share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.hlo import Computation, Instruction, Program, leaves_of
from meshwright.ledger import MultiplyAdds, instruction_work

from ._machine import Machine
from ._rates import attention_seconds, gemm_seconds

_VIEWS = ("bitcast", "reshape", "get-tuple-element")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the index of the operand that holds the new values


def bytes_of(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that one run of a scheduled instruction reads plus those that it writes."""
    if instruction.opcode == "fusion":
        called = program.computations[instruction.all_called[0]]
        reads = sum(_read(program, called, parameter) for parameter in called.parameters)
        return reads + _written(program, called, called.root)
    results = sum(array.num_bytes for array in instruction.arrays)
    if instruction.opcode in _SLICES:
        return 2 * results
    if instruction.opcode in _UPDATES:
        return 2 * _new_bytes(computation, instruction)
    if instruction.opcode in ("broadcast", "iota"):
        return results
    operands = computation.operand_arrays(instruction)
    return results + sum(array.num_bytes for operand in operands for array in leaves_of(operand))


def _new_bytes(computation: Computation, update: Instruction) -> int:
    operand = computation.operand_shape(update.operands[_UPDATES[update.opcode]])
    return sum(array.num_bytes for array in leaves_of(operand))


def _read(program: Program, computation: Computation, value: Instruction) -> int:
    """Return the bytes of `value` that its users in a fused computation read, at most its size."""
    whole = sum(array.num_bytes for array in value.arrays)
    needed = 0
    for user in computation.instructions:
        for number, operand in enumerate(user.operands):
            if operand.name == value.name and needed < whole:
                needed += _read_by(program, computation, user, number, whole)
    return min(needed, whole)


def _read_by(program: Program, computation: Computation, user: Instruction, number: int, whole: int) -> int:
    if user.opcode in _VIEWS:
        return _read(program, computation, user)
    if user.opcode in _SLICES and number == 0:
        return sum(array.num_bytes for array in user.arrays)
    if user.opcode == "dynamic-update-slice" and number == 0:
        return 0  # the rest stays in place
    if user.opcode == "scatter" and number == 0:
        return _new_bytes(computation, user)
    if user.opcode == "fusion":
        inner = program.computations[user.all_called[0]]
        return _read(program, inner, inner.parameters[number])
    return 0 if user.opcode == "tuple" else whole


def _written(program: Program, computation: Computation, value: Instruction) -> int:
    """Return the bytes that a fused computation writes for its result, or for a part of it."""
    if value.opcode == "tuple":
        return sum(_written(program, computation, computation.by_name[o.name]) for o in value.operands)
    if value.opcode in ("bitcast", "reshape"):
        return _written(program, computation, computation.by_name[value.operands[0].name])
    if value.opcode in _UPDATES:
        return _new_bytes(computation, value)
    if value.opcode == "fusion":
        inner = program.computations[value.all_called[0]]
        return _written(program, inner, inner.root)
    if value.opcode == "parameter":
        return 0  # passed through unchanged
    return sum(array.num_bytes for array in value.arrays)


# These launch no kernel: names, views and constants.
FREE = frozenset((
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "add-dependency",
    "partition-id", "replica-id", "opt-barrier", "domain",
))  # fmt: skip
_HOST_SPACE = 5
_CALLING = ("fusion", "call", "async-start", "custom-call")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One run of an instruction on the compute stream.

    `kind`: matmul | attention | convolution | memory-bound | host-transfer. `flops`: FLOPs by the format in
    which they run. `unpriced`: arithmetic in a format for which the chip has no known peak.
    """

    kind: str
    seconds: float
    flops: Counter[str]
    unpriced: tuple[str, ...] = ()


def kernel_of(
    machine: Machine, program: Program, computation: Computation, instruction: Instruction
) -> Kernel:
    """Price one instruction that is neither a collective, nor a loop, nor free."""
    num_bytes = bytes_of(program, computation, instruction)
    found: dict[str, float] = {}
    flops: Counter[str] = Counter()
    unpriced: list[str] = []
    for inner, place, work in _works(program, computation, instruction):
        format_name = _running_format(machine, place, work.format)
        per_second = machine.gemm_flops_per_second(format_name)
        if per_second is None:
            unpriced.append(f"{work.kind} in {format_name}: {machine.name} has no known peak for it")
            continue
        flops[format_name] += work.flops
        if work.kind == "attention":
            seconds = _attention(machine, inner, place, work, format_name)
        else:
            narrowed = machine.narrow_products and work.format == "fp32"
            seconds = _product(machine, inner, place, work, format_name, num_bytes / (1 + narrowed))
        found[work.kind] = found.get(work.kind, 0.0) + seconds
    if found:
        kind = max(found, key=lambda k: found[k])
        return Kernel(kind=kind, seconds=sum(found.values()), flops=flops, unpriced=tuple(unpriced))
    crossing_bytes = _host_transfer_bytes(computation, instruction)
    if crossing_bytes and machine.host_bytes_per_second:
        seconds = crossing_bytes / machine.host_bytes_per_second
        return Kernel(kind="host-transfer", seconds=seconds, flops=flops)
    seconds = num_bytes / (machine.memory_bytes_per_second * machine.memory_efficiency)
    return Kernel(kind="memory-bound", seconds=seconds, flops=flops, unpriced=tuple(unpriced))


def _works(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction, MultiplyAdds]]:
    """Yield each instruction inside that multiplies and adds, with its computation and its work.

    A dot that XLA rewrote as a `multiply` runs as elementwise arithmetic, so it is left out.
    """
    if instruction.opcode in _CALLING and instruction.all_called:
        for name in instruction.all_called:
            inner = program.computations[name]
            for each in inner.instructions:
                yield from _works(program, inner, each)
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
    if instruction.opcode == "custom-call":
        gemm = instruction.backend_config.get("gemm_backend_config", {})
    return f"{instruction.attributes.get('operand_precision', '')}{gemm.get('precision_config', '')}".lower()


def _product(
    machine: Machine,
    computation: Computation,
    instruction: Instruction,
    work: MultiplyAdds,
    format_name: str,
    num_bytes: float,
) -> float:
    batch, m, n, k = _sizes(computation, instruction, work)
    rate, peak = machine.rates.gemm_for(format_name), machine.gemm_flops_per_second(format_name)
    assert peak is not None, f"{format_name} was looked up before"
    if machine.num_sms is None:
        arithmetic = work.flops / (peak * rate.efficiency)
        memory = num_bytes / (machine.memory_bytes_per_second * rate.memory_efficiency)
        return max(arithmetic, memory) + rate.start_seconds
    seconds = float(
        gemm_seconds(
            rate,
            m=m,
            n=n,
            k=k,
            batch=batch,
            num_bytes=num_bytes,
            flops_per_second=peak,
            memory_bytes_per_second=machine.memory_bytes_per_second,
            num_sms=machine.num_sms,
        )
    )
    sustained = machine.sustained_flops_per_second(format_name)
    return seconds if sustained is None else max(seconds, work.flops / sustained)


def _sizes(
    computation: Computation, instruction: Instruction, work: MultiplyAdds
) -> tuple[float, float, float, float]:
    """Return batch, m, n and k such that 2 x batch x m x n x k is the work.

    A convolution has the sizes of the matmul that its implicit-GEMM kernel computes: n is the result's minor
    dimension.
    """
    result = instruction.arrays[0]
    if work.kind == "convolution" or instruction.opcode == "ragged-dot":
        batch, n = 1, result.dims[-1] if result.dims else 1
        m = result.num_elements / n
    else:
        left = computation.operand_arrays(instruction)[0]
        assert not isinstance(left, tuple), f"%{instruction.name} multiplies a tuple"
        batch = prod(left.dims[d] for d in _dimensions(instruction, "batch"))
        contracted = prod(left.dims[d] for d in _dimensions(instruction, "contracting"))
        m = left.num_elements / (batch * contracted)
        n = result.num_elements / (batch * m)
    return batch, m, n, work.flops / (2 * result.num_elements)


def _dimensions(instruction: Instruction, kind: str) -> list[int]:
    """Return dimensions of a dot's left operand, from its attributes or the cuBLAS call's configuration."""
    if instruction.opcode == "custom-call":
        config = instruction.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
        return [int(d) for d in config.get(f"lhs_{kind}_dimensions", [])]
    text = instruction.attributes.get(f"lhs_{kind}_dims", "{}").strip("{}")
    return [int(d) for d in text.split(",") if d.strip()]


def _attention(
    machine: Machine, computation: Computation, instruction: Instruction, work: MultiplyAdds, format_name: str
) -> float:
    """Return the seconds of one attention call. `work` counts two matmuls forward and five backward."""
    config = instruction.backend_config["cudnn_fmha_backend_config"]
    query = computation.operand_arrays(instruction)[0]
    assert not isinstance(query, tuple), f"%{instruction.name} attends to a tuple"
    length = int(config["intermediate_tensor_shape"]["dimensions"][-1])
    backward = "Backward" in instruction.custom_call_target
    return float(
        attention_seconds(
            machine.attention_rate(query.dims[-1], length, format_name, backward),
            flops=work.flops,
            length=length,
            flops_per_second=machine.peak_flops_per_second[format_name],
        )
    )


def _host_transfer_bytes(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes of a copy between host memory and device memory; 0 for any other instruction.

    The array on the device's side is counted. The array on the host may hold many layers, of which the copy
    reads or writes one.
    """
    if not instruction.opcode.startswith("copy") and instruction.opcode != "fusion":
        return 0
    shapes = (instruction.shape, *(a for a in computation.operand_arrays(instruction)))
    arrays = [array for shape in shapes for array in leaves_of(shape)]
    if all(array.memory_space != _HOST_SPACE for array in arrays):
        return 0
    return max((array.num_bytes for array in arrays if array.memory_space != _HOST_SPACE), default=0)
