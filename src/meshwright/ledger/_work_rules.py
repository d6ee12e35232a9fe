"""Count the arithmetic of one HLO instruction: products, elementwise work, and users' custom calls.

All counts are for one run on one device, from the instruction's shapes and attributes alone.

Products (`work_of`). Counted: dot (also ragged and block-scaled), convolution, the library calls that XLA's
GPU backend puts in their place, cuDNN attention, and products that XLA's simplifier made from a dot. A
multiply-add is two FLOPs, and eight for complex numbers (four products, four sums). Decompositions, linear
systems and Fourier transforms count by textbook formula (`_library_calls`). Not counted: a convolution's taps
on padding, as in XLA's own cost analysis; model FLOPs count them.

Elementwise work (`elementwise_of`), by class. Counted: as in XLA's own cost analysis
(xla/service/hlo_cost_analysis.cc), one operation for each element of the result, a division like an addition.
A reduction counts each operation of its computation once for each element that disappears. Unlike in XLA,
`arithmetic` holds only floating-point operations. Integer and logical operations (addresses, masks, random
bits) have a class of their own, because they are not FLOPs. Not counted: work inside a library call (the
softmax of a fused attention, a product's epilogue), the sums of a collective, random-bit generators.

Users add rules for custom calls, into which XLA cannot look, with `register_call`. `unpriced_work` names
what could do arithmetic and has no rule, and sorts, which compare and have no FLOPs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.compiler import NamedKernel
from meshwright.errors import InputError
from meshwright.hlo import Array, Computation, Instruction, Program, twice_seen

from ._library_calls import is_library_work, library_work

Shape = tuple[str, tuple[int, ...]]  # element type as XLA names it ("bf16"), and dimensions on one device


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiplyAdds:
    """Multiply-adds of one kind in one instruction, or the FLOPs of a textbook formula.

    `format`: the number format of the first operand; fp8-e5m2 for a product of fp8-e4m3 and fp8-e5m2.
    `recompute_flops`: the part of `flops` that repeats work of the forward pass.
    """

    kind: str  # matmul | convolution | attention | linear algebra | fft
    flops: int
    format: str
    recompute_flops: int = 0


KERNEL = "meshwright_kernel"  # the attribute of a call whose FLOPs the traced program has


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomCall:
    """A custom call of the compiled program, on one device; tuples are flattened."""

    target: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    backend_config: str


_Rule = Callable[[Computation, Instruction], MultiplyAdds | None]
_REGISTERED: dict[str, Callable[[CustomCall], MultiplyAdds]] = {}


def register_call(target: str, rule: Callable[[CustomCall], MultiplyAdds]) -> None:
    """Count the custom calls whose target begins with `target` by your own rule from now on.

    Your rule takes precedence over the built-in rules. The ledger's executed FLOPs, and the time predicted
    from them, use it. The traced program's model FLOPs still list the call as unpriced.

    Args:
        target: the beginning of `custom_call_target`, as the ledger's `unpriced` names it.
        rule: a function that takes the `CustomCall` and returns its `MultiplyAdds` on one device.

    Raises:
        InputError: the target is empty, or `rule` is not a function.

    >>> from meshwright.ledger import CustomCall, MultiplyAdds
    >>> def my_matmul(call: CustomCall) -> MultiplyAdds:
    ...     (_, (m, k)), (_, (_, n)) = call.operands
    ...     return MultiplyAdds(kind="matmul", flops=2 * m * k * n, format="bf16")
    >>> register_call("my_matmul", my_matmul)
    """
    if not target:
        raise InputError(
            "the rule for a custom call has no target", hint="give the beginning of the call's target"
        )
    if not callable(rule):
        hint = "give a function of a CustomCall"
        raise InputError(f"the rule for {target!r} is not a function: {rule!r}", hint=hint)
    _REGISTERED[target] = rule


def registered_targets() -> tuple[str, ...]:
    """Return the targets that have a rule of the user's."""
    return tuple(_REGISTERED)


FORMATS = {
    "f64": "fp64", "f32": "fp32", "f16": "fp16", "f8e4m3fn": "fp8-e4m3", "f8e4m3": "fp8-e4m3",
    "f8e4m3fnuz": "fp8-e4m3", "f8e5m2": "fp8-e5m2", "f8e5m2fnuz": "fp8-e5m2", "f4e2m1fn": "fp4",
    "s8": "int8", "u8": "int8", "s4": "int4", "u4": "int4",
}  # fmt: skip
# Custom calls without a matrix product: they move or mark data, draw random bits, or normalise.
WITHOUT_MATMULS = frozenset((
    "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint", "AllocateBuffer",
    "MoveToHost", "MoveToDevice", "PinToDevice", "PinToDeviceSram", "annotate_device_placement",
    "AssumeGatherIndicesInBound", "X64Combine", "X64SplitLow", "X64SplitHigh", "cu_threefry2x32",
    "cu_threefry2x32_ffi", "__cudnn$norm", "AsyncCollectiveStart", "AsyncCollectiveDone", "ConcatBitcast",
    "GatherScatterIndicesBitpacked", "cu_lu_pivots_to_permutation",
    "PrepareAsyncCallStart", "PrepareAsyncCallDone",  # of a TPU v7x's messages: no operands but a token
    "SliceId", "ZeroCrop",  # of several TPU slices: the number of one's own, and padding with zeros
))  # fmt: skip
BLOCK_SCALED = "__cudnn$blockScaledDot"
CALLS_TO_THE_HOST = frozenset(  # of `jax.debug.print`, `io_callback`, `pure_callback`
    f"xla_ffi{part}_python_{device}_callback" for part in ("", "_partitioned") for device in ("gpu", "cpu")
)
OPCODES_WITHOUT_RULE = frozenset(("sort", "topk"))


def work_of(computation: Computation, instruction: Instruction) -> MultiplyAdds | None:
    """Return the multiply-adds of `instruction` itself, without computations that it calls; None if none.

    Sources: for dot and convolution, their definitions at https://openxla.org/xla/operation_semantics. For
    attention, Dao et al. 2022, arXiv 2205.14135: two matmuls forward, and five backward, of which one repeats
    the scores. Each counts by half where the mask is causal. For decompositions and transforms:
    `contrib.linear_algebra`.
    """
    rule = _rule_for(instruction)
    return rule(computation, instruction) if rule else None


def unpriced_work(computation: Computation, instruction: Instruction) -> str | None:
    """Describe an instruction that could do multiply-adds and has no rule; return None for any other."""
    name = instruction.custom_call_target or instruction.opcode
    if instruction.opcode == "custom-call":
        without = name in WITHOUT_MATMULS or name in CALLS_TO_THE_HOST
        without |= (
            instruction.op_name == "ragged-dot-metadata"
        )  # which rows a TPU's tiles have, in whole numbers
        has_rule = without or _rule_for(instruction) is not None
    else:
        has_rule = name not in OPCODES_WITHOUT_RULE
    if has_rule:
        return None
    inputs, outputs = (
        ", ".join(map(str, arrays))
        for arrays in (computation.operand_arrays(instruction), instruction.arrays)
    )
    return f"{name}({inputs}) -> {outputs}, from {instruction.op_name or 'an unnamed operation'}"


def calls_the_host(instruction: Instruction) -> bool:
    """Return whether an instruction calls a Python function on the host, or sends it what it calls with."""
    if instruction.opcode == "send":  # a TPU's call is a transfer each way
        return instruction.attributes.get("is_host_transfer") == "true"
    return instruction.opcode == "custom-call" and instruction.custom_call_target in CALLS_TO_THE_HOST


def _rule_for(instruction: Instruction) -> _Rule | None:
    """Return the user's rule with the longest beginning of a call's target, else the built-in one."""
    if instruction.opcode != "custom-call":
        return _library if is_library_work(instruction) else _OPCODE_RULES.get(instruction.opcode)
    target = instruction.custom_call_target
    beginnings = [beginning for beginning in _REGISTERED if target.startswith(beginning)]
    if beginnings:
        rule = _REGISTERED[max(beginnings, key=len)]
        return lambda computation, instruction: rule(_call(computation, instruction))
    if KERNEL in instruction.attributes:
        return lambda computation, instruction: _traced_kernel(instruction)
    if is_library_work(instruction):
        return _library
    if is_ragged_call(instruction):
        return _ragged_call
    return next((rule for prefix, rule in _TARGET_RULES if target.startswith(prefix)), None)


def mark_kernels(program: Program, kernels: Sequence[NamedKernel]) -> None:
    """Give each custom call that is a kernel of the traced program that kernel's FLOPs.

    A call is recognised by the arrays that it takes and returns. Where several kernels take and return the
    same, its name decides. A call for which kernels of different FLOPs remain is left without any.
    """
    for computation, instruction in program.instructions():
        target = instruction.custom_call_target if instruction.opcode == "custom-call" else ""
        known = is_library_work(instruction) or any(target.startswith(prefix) for prefix, _ in _TARGET_RULES)
        known |= is_ragged_call(instruction)
        if not target or known:
            continue
        operands = [(a.dtype, a.dims) for a in computation.operand_arrays(instruction)]
        results = [(a.dtype, a.dims) for a in instruction.arrays]
        found = [each for each in kernels if _takes(each, operands) and list(each.results) == results]
        text = f"{instruction.op_name} {target} {instruction.attributes.get('backend_config', '')}"
        if len({(each.flops, each.name) for each in found}) > 1:
            named = [each for each in found if each.name in text]
            found = named or found
        if found and len({each.flops for each in found}) == 1:
            fields = dataclasses.asdict(found[0])
            facts = {name: value for name, value in fields.items() if name not in ("operands", "results")}
            instruction.attributes[KERNEL] = json.dumps(facts)


def _takes(kernel: NamedKernel, operands: list[Shape]) -> bool:
    """Return whether a call's operands are a kernel's; a compiler may append buffers of its own."""
    return operands[: len(kernel.operands)] == list(kernel.operands)


def traced_kernel_of(instruction: Instruction) -> NamedKernel | None:
    """Return the kernel that `mark_kernels` found for an instruction, without its arrays; None for others."""
    text = instruction.attributes.get(KERNEL)
    return None if text is None else NamedKernel(**json.loads(text), operands=(), results=())


def _traced_kernel(instruction: Instruction) -> MultiplyAdds:
    kernel = traced_kernel_of(instruction)
    assert kernel is not None, "the rule is of a marked call"
    return MultiplyAdds(
        kind=kernel.kind,
        flops=kernel.flops,
        format=kernel.format,
        recompute_flops=kernel.recompute_flops,
    )


def _library(computation: Computation, instruction: Instruction) -> MultiplyAdds:
    kind, flops, dtype = library_work(computation, instruction)
    return MultiplyAdds(kind=kind, flops=flops, format=format_of(dtype))


def _call(computation: Computation, instruction: Instruction) -> CustomCall:
    return CustomCall(
        target=instruction.custom_call_target,
        operands=tuple((a.dtype, a.dims) for a in computation.operand_arrays(instruction)),
        results=tuple((a.dtype, a.dims) for a in instruction.arrays),
        backend_config=instruction.attributes.get("backend_config", ""),
    )


def format_of(dtype: str) -> str:
    """Return the project's name ("bf16", "fp8-e4m3") for the number format of an element type."""
    return FORMATS.get(dtype, dtype)


def left_dimensions(instruction: Instruction, kind: str) -> list[int]:
    """Return the `batch` or `contracting` dimensions of a product's left operand.

    They stand in the attributes of a dot, and in the configuration of a call of cuBLAS.
    """
    if instruction.custom_call_target.startswith(BLOCK_SCALED):  # [..., m, k] x [..., n, k]
        rank = len(instruction.arrays[0].dims)
        return list(range(rank - 2)) if kind == "batch" else [rank - 1]
    if instruction.opcode == "custom-call":
        numbers = instruction.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
        return [int(d) for d in numbers.get(f"lhs_{kind}_dimensions", [])]
    return _dims(instruction, f"lhs_{kind}_dims")


def _dims(instruction: Instruction, attribute: str) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", instruction.attributes.get(attribute, ""))]


def _multiply_add(array: Array) -> int:
    """Return the real FLOPs of one multiply-add of an array's numbers; both operands have that type."""
    return 8 if array.dtype.startswith("c") else 2


def _dot(computation: Computation, instruction: Instruction) -> MultiplyAdds:
    """Count a dot or a call of cuBLAS.

    A product of E4M3 and E5M2 has the gradient's format, E5M2. The compiler may swap the sides, so the
    gradient may be on either.
    """
    left, right = computation.operand_arrays(instruction)[:2]
    contracted = math.prod(left.dims[d] for d in left_dimensions(instruction, "contracting"))
    flops = _multiply_add(left) * instruction.arrays[0].num_elements * contracted
    formats = format_of(left.dtype), format_of(right.dtype)
    format_name = formats[1] if formats == ("fp8-e4m3", "fp8-e5m2") else formats[0]
    return MultiplyAdds(kind="matmul", flops=flops, format=format_name)


def _ragged_dot(computation: Computation, instruction: Instruction) -> MultiplyAdds:
    """Count a ragged dot: each row meets only its own group's matrix, so groups do not multiply the work."""
    left, right = computation.operand_arrays(instruction)[:2]
    attributes = ("rhs_contracting_dims", "rhs_batch_dims", "rhs_group_dims")
    spent = {d for attribute in attributes for d in _dims(instruction, attribute)}
    columns = math.prod(size for d, size in enumerate(right.dims) if d not in spent)
    flops = _multiply_add(left) * left.num_elements * columns
    return MultiplyAdds(kind="matmul", flops=flops, format=format_of(left.dtype))


def is_ragged_call(instruction: Instruction) -> bool:
    """Return whether a custom call is XLA's own kernel for a ragged dot on TPUs: it says how it is tiled."""
    return instruction.opcode == "custom-call" and "ragged_dot_tiling=" in _frontend(instruction)


def _frontend(instruction: Instruction) -> str:
    return instruction.attributes.get("frontend_attributes", "")


def _ragged_call(computation: Computation, instruction: Instruction) -> MultiplyAdds:
    """Count the whole tiles of a TPU's ragged dot, as many of its rows as its grid has at most.

    A tile of rows that two groups share is computed for both; where a group ends is known to the run alone.
    The gradient of the groups' matrices, [groups, depth, columns], is one call as well from libtpu 0.0.50 on.
    """
    left, right = computation.operand_arrays(instruction)[-2:]
    result = instruction.arrays[0]
    found = re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', _frontend(instruction))
    assert found, f"%{instruction.name}: {_frontend(instruction)}"
    rows, depth, columns = map(int, found.groups())
    groups = (result if len(result.dims) > len(left.dims) else right).dims[0]
    num_tiles = -(-left.dims[0] // rows) + groups - 1
    whole_depth = -(-left.dims[-1] // depth) * depth
    whole_columns = -(-result.dims[-1] // columns) * columns
    flops = _multiply_add(left) * num_tiles * rows * whole_depth * whole_columns
    return MultiplyAdds(kind="matmul", flops=flops, format=format_of(left.dtype))


def _multiply(computation: Computation, instruction: Instruction) -> MultiplyAdds | None:
    """Count an elementwise product that XLA made from a dot with a dimension of one.

    A sum may follow it. Each element of the product counts as one multiply-add.
    """
    if not isinstance(shape := instruction.shape, Array) or shape.dtype[0] in "su":
        return None  # an integer product is the partitioner's arithmetic on offsets
    names = [instruction.op_name]
    if not instruction.has_path:  # on TPUs only the sum over the products keeps the path
        users = computation.users[instruction.name]
        names = [u.op_name for u in users if u.opcode == "reduce" and u.operands[0].name == instruction.name]
    if not any(name.endswith("dot_general") for name in names):
        return None
    flops = _multiply_add(shape) * shape.num_elements
    return MultiplyAdds(kind="matmul", flops=flops, format=format_of(shape.dtype))


def _attention(computation: Computation, instruction: Instruction) -> MultiplyAdds:
    config: dict[str, Any] = instruction.backend_config["cudnn_fmha_backend_config"]
    query, _, value = computation.operand_arrays(instruction)[:3]
    shape = [int(d) for d in config["intermediate_tensor_shape"]["dimensions"]]
    twice = 2 * math.prod(shape)
    if window := int(config.get("sliding_window_length", 0)):
        twice = math.prod(shape[:-2]) * twice_seen(shape[-1], window)
    elif "CAUSAL" in config["mask_type"]:
        twice //= 2
    scores, values = twice * query.dims[-1], twice * value.dims[-1]
    backward = "Backward" in instruction.custom_call_target
    return MultiplyAdds(
        kind="attention",
        flops=3 * scores + 2 * values if backward else scores + values,
        format=format_of(query.dtype),
        recompute_flops=scores if backward else 0,
    )


def _convolution(computation: Computation, instruction: Instruction) -> MultiplyAdds:
    """Count a convolution: multiply-add x batch x features in x features out x pairs that meet an element.

    A pair is an output position and a window position. XLA's HloCostAnalysis::HandleConvolution counts the
    same. A TPU's matmul is the case without a window. cuDNN's three calls keep the forward convolution's
    window and labels; only the roles of the arrays change.
    """
    first, second = computation.operand_arrays(instruction)[:2]
    result, target = instruction.arrays[0], instruction.custom_call_target
    image, kernel, out = first, second, result
    if target.startswith("__cudnn$convBackwardFilter"):
        kernel, out = result, second
    elif target.startswith("__cudnn$convBackwardInput"):
        image, out = result, first
    labels = re.match(r"([^_]+)_([^-]+)->(.+)$", instruction.attributes["dim_labels"])
    assert labels, f"%{instruction.name}: dim_labels {instruction.attributes['dim_labels']!r}"
    in_labels, kernel_labels, out_labels = labels.groups()
    window = _window(instruction)
    pairs = 1
    for label in (c for c in kernel_labels if c.isdigit()):
        fields = {name: values[int(label)] for name, values in window.items()}
        pairs *= _meeting_pairs(
            size=image.dims[in_labels.index(label)],
            window=kernel.dims[kernel_labels.index(label)],
            outputs=out.dims[out_labels.index(label)],
            stride=fields.get("stride", 1),
            low=fields.get("pad", 0),
            base_dilation=fields.get("lhs_dilate", 1),
            window_dilation=fields.get("rhs_dilate", 1),
        )
    batch = image.dims[in_labels.index("b")] // int(instruction.attributes.get("batch_group_count", "1"))
    features = kernel.dims[kernel_labels.index("i")] * kernel.dims[kernel_labels.index("o")]
    flops = _multiply_add(image) * batch * features * pairs
    return MultiplyAdds(kind="convolution", flops=flops, format=format_of(first.dtype))


def _window(instruction: Instruction) -> dict[str, list[int]]:
    """Parse each field of a window by spatial dimension; "pad=1_2x0_0" keeps only its low side (1, 0)."""
    text = instruction.attributes.get("window", "{}").strip("{}")
    fields = re.findall(r"(\w+)=(\S+)", text)
    return {key: [int(part.split("_")[0]) for part in value.split("x")] for key, value in fields}


@functools.lru_cache(maxsize=10_000)
def _meeting_pairs(
    *, size: int, window: int, outputs: int, stride: int, low: int, base_dilation: int, window_dilation: int
) -> int:
    """Count the (output, window) positions of one dimension that meet an element, not a hole or padding."""
    last = (size - 1) * base_dilation
    pairs = 0
    for tap in range(window):
        offset = tap * window_dilation - low
        first = max(0, -(offset // stride))  # the smallest output with output x stride + offset >= 0
        final = min(outputs - 1, (last - offset) // stride)
        if base_dilation == 1:
            pairs += max(0, final - first + 1)
        else:
            pairs += sum((o * stride + offset) % base_dilation == 0 for o in range(first, final + 1))
    return pairs


_OPCODE_RULES: dict[str, _Rule] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": _ragged_dot,
    "multiply": _multiply,
    "convolution": _convolution,
}
_TARGET_RULES: tuple[tuple[str, _Rule], ...] = (
    ("__cublas$gemm", _dot),
    (BLOCK_SCALED, _dot),
    ("__cublas$lt$matmul", _dot),
    ("__cudnn$conv", _convolution),
    ("__cudnn$fmha", _attention),
)

CLASSES = ("arithmetic", "transcendental", "comparison", "reduction", "conversion", "integer")
_OPCODES_BY_CLASS = {
    "transcendental": (
        "exponential exponential-minus-one log log-plus-one logistic power sqrt rsqrt cbrt tanh sine cosine "
        "tan atan2 erf acos acosh asin asinh atanh cosh sinh"
    ),
    "comparison": "compare select clamp is-finite",
    "conversion": "convert reduce-precision stochastic-convert",
    "arithmetic": (
        "add subtract multiply divide negate maximum minimum abs sign remainder floor ceil "
        "round-nearest-afz round-nearest-even and or xor not shift-left shift-right-arithmetic "
        "shift-right-logical popcnt count-leading-zeros complex real imag"
    ),
}
_CLASS_OF = {opcode: name for name, opcodes in _OPCODES_BY_CLASS.items() for opcode in opcodes.split()}
_FLOATING = ("f", "b", "c")  # first letters of f32, bf16, c64; not of pred, s32, u8


def elementwise_of(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[str, int] | None:
    """Return the class and number of operations of one run on one device; None where it has none.

    Call this only if `work_of` returns None, because `work_of` counts elementwise products made from a dot.
    """
    opcode = instruction.opcode
    if opcode in ("reduce", "reduce-window", "select-and-scatter", "scatter"):
        return "reduction", _combined(program, computation, instruction)
    if opcode != "map" and opcode not in _CLASS_OF:
        return None
    result = instruction.arrays[0]
    if opcode == "map":
        return "arithmetic", result.num_elements * _operations(program, instruction, "to_apply")
    name = _CLASS_OF[opcode]
    if name == "arithmetic" and not result.dtype.startswith(_FLOATING):
        name = "integer"
    return name, result.num_elements


def _combined(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Count the operations with which a reduction, a window or a scatter combines elements."""
    operands, result = computation.operand_arrays(instruction), instruction.arrays[0]
    if instruction.opcode == "select-and-scatter":
        selections = math.prod(_window(instruction)["size"]) - 1
        selected = selections * _operations(program, instruction, "select")
        return operands[1].num_elements * (selected + _operations(program, instruction, "scatter"))
    if instruction.opcode == "reduce-window":
        pairs = _combined_in_windows(operands[0], result, _window(instruction)["size"])
    elif instruction.opcode == "scatter":  # its operands are targets, indices, updates
        pairs = operands[-1].num_elements
    elif instruction.op_name.endswith("dot_general"):
        return 0  # the sum over a dot's products is counted with them: a multiply-add is two FLOPs
    else:
        pairs = max(0, operands[0].num_elements - result.num_elements)
    return pairs * _operations(program, instruction, "to_apply")


def _combined_in_windows(operand: Array, result: Array, sizes: Sequence[int]) -> int:
    """Count the pairs that a reduction of windows combines.

    A window that meets all elements of a dimension wherever it lies has one result for all of them, which is
    formed once. XLA's compiler for TPUs writes a reduction so that is broadcast again, as of a softmax.
    """
    num_results = num_combined = 1
    for size, length, results in zip(sizes, operand.dims, result.dims, strict=True):
        is_whole = size >= length + results - 1
        num_results *= 1 if is_whole else results
        num_combined *= length if is_whole else size
    return num_results * (num_combined - 1)


def _operations(program: Program, instruction: Instruction, role: str) -> int:
    """Count the operations of a combining computation: one for a sum, several for an argmax."""
    combining = [program.computations[name] for name in instruction.called[role]]
    counts = (elementwise_of(program, inner, i) for inner in combining for i in inner.instructions)
    return sum(count[1] for count in counts if count is not None)
