"""Count the arithmetic of one HLO instruction: products, elementwise work, and users' custom calls.

Rules of users for custom calls of their own: what a kernel that XLA cannot look into does.

FLOPs of one instruction on one device, executed once, from its shapes and attributes alone.

Counted: dot (also ragged and block-scaled), convolution, the library calls that XLA's GPU backend
replaces them by, cuDNN attention, and products that XLA's simplifier made of a dot. A multiply-add is two,
of complex numbers eight (four products, four sums). A convolution's taps on padding are left out, as in
XLA's own cost analysis; model FLOPs count them.
Not counted here: elementwise work and reductions (see `_elementwise`). What could do arithmetic and has no
rule is named by `unpriced_work`; sorts and Fourier transforms are.

Operations of one instruction that are no multiply-adds of a product: elementwise work, by class.

Counted as XLA's own cost analysis does (xla/service/hlo_cost_analysis.cc): one for each element of the
result, a division like an addition. A reduction counts what it combines: for each element that disappears,
each operation of its computation. Beside XLA's rule: `arithmetic` is of floating numbers alone, and integer
and logical operations (addresses, masks, random bits) have a class of their own, for they are no FLOPs.
Not counted: what a library call does inside (the softmax of a fused attention, a product's epilogue), the
sums of a collective, random bits. Sorts and Fourier transforms have no rule: `unpriced_work` names them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError

from ..hlo import Array, Computation, Instruction, Program, has_path, leaves_of

Shape = tuple[str, tuple[int, ...]]  # element type as XLA names it ("bf16"), and dimensions on one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Multiply-adds of one kind in one instruction; `format` is that of the first operand.

    `recompute_flops`: the part of `flops` that repeats work of the forward pass.
    """

    kind: str  # matmul | convolution | attention
    flops: int
    format: str
    recompute_flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A custom call as the compiled program has it, on one device; tuples are flattened."""

    target: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    backend_config: str


Rule = Callable[[Call], Work]
_RULES: dict[str, Rule] = {}


def register_call(target: str, rule: Rule) -> None:
    """Count the custom calls whose target begins with `target` by a rule of your own, from now on.

    It goes before the rules that are built in. The ledger's executed FLOPs are counted by it, and time
    predicted from them; the traced program's model FLOPs still list the call as unpriced.

    Args:
        target: the beginning of `custom_call_target`, as the ledger's `unpriced` names it.
        rule: from the call's shapes to its `Work` on one device.

    Raises:
        InputError: the target is empty, or `rule` is no function.
    """
    if not target:
        raise InputError("a rule for a custom call without a name", hint="name the beginning of its target")
    if not callable(rule):
        raise InputError(
            f"the rule for {target!r} is no function: {rule!r}", hint="give a function of a Call"
        )
    _RULES[target] = rule


def registered(target: str) -> Rule | None:
    """The user's rule for a target: that of the longest beginning."""
    found = [beginning for beginning in _RULES if target.startswith(beginning)]
    return _RULES[max(found, key=len)] if found else None


FORMATS = {
    "f64": "fp64", "f32": "fp32", "f16": "fp16", "f8e4m3fn": "fp8-e4m3", "f8e4m3": "fp8-e4m3",
    "f8e4m3fnuz": "fp8-e4m3", "f8e5m2": "fp8-e5m2", "f8e5m2fnuz": "fp8-e5m2", "f4e2m1fn": "fp4",
    "s8": "int8", "u8": "int8", "s4": "int4", "u4": "int4",
}  # fmt: skip
# Custom calls that move, mark or draw random bits: no multiply-adds in them.
WITHOUT_MATMULS = frozenset((
    "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint", "AllocateBuffer",
    "MoveToHost", "MoveToDevice", "PinToDevice", "PinToDeviceSram", "annotate_device_placement",
    "AssumeGatherIndicesInBound", "X64Combine", "X64SplitLow", "X64SplitHigh", "cu_threefry2x32",
    "cu_threefry2x32_ffi", "__cudnn$norm", "AsyncCollectiveStart", "AsyncCollectiveDone", "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
))  # fmt: skip
OPCODES_WITHOUT_RULE = frozenset(("cholesky", "triangular-solve", "fft", "sort", "topk"))


def work_of(computation: Computation, instruction: Instruction) -> Work | None:
    """The multiply-adds of `instruction` itself (not of what it calls); None where it has none.

    Sources: the dot's and convolution's definitions at https://openxla.org/xla/operation_semantics;
    attention: two matmuls forward, five backward of which one repeats the scores (Dao et al. 2022,
    arXiv 2205.14135), each counted by half where the mask is causal.
    """
    rule = _OPCODE_RULES.get(instruction.opcode)
    if instruction.opcode == "custom-call":
        target = instruction.custom_call_target
        if (own := registered(target)) is not None:
            return own(_call(computation, instruction))
        rule = next((rule for prefix, rule in _TARGET_RULES if target.startswith(prefix)), None)
    return rule(computation, instruction) if rule else None


def unpriced_work(computation: Computation, instruction: Instruction) -> str | None:
    """How a report names an instruction that could do multiply-adds and has no rule; else None."""
    if instruction.opcode == "custom-call":
        name = instruction.custom_call_target
        known = name in WITHOUT_MATMULS or registered(name) is not None
        if known or any(name.startswith(prefix) for prefix, _ in _TARGET_RULES):
            return None
    elif instruction.opcode in OPCODES_WITHOUT_RULE:
        name = instruction.opcode
    else:
        return None
    inputs = ", ".join(str(a) for s in computation.operand_shapes(instruction) for a in leaves_of(s))
    outputs = ", ".join(map(str, instruction.shapes))
    return f"{name}({inputs}) -> {outputs}, from {instruction.op_name or 'an unnamed operation'}"


def _call(computation: Computation, instruction: Instruction) -> Call:
    operands = computation.operand_shapes(instruction)
    return Call(
        target=instruction.custom_call_target,
        operands=tuple((a.dtype, a.dims) for shape in operands for a in leaves_of(shape)),
        results=tuple((a.dtype, a.dims) for a in instruction.shapes),
        backend_config=instruction.attributes.get("backend_config", ""),
    )


def format_of(dtype: str) -> str:
    """The number format of an element type, by the project's names ("bf16", "fp8-e4m3")."""
    return FORMATS.get(dtype, dtype)


def _array(computation: Computation, instruction: Instruction, number: int) -> Array:
    return leaves_of(computation.operand_shape(instruction.operands[number]))[0]


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in re.findall(r"\d+", text))


def _product_format(computation: Computation, instruction: Instruction) -> str:
    """The left operand's; of E4M3 with E5M2 the gradient's, for the compiler may swap the sides."""
    left, right = (format_of(_array(computation, instruction, n).dtype) for n in (0, 1))
    return right if (left, right) == ("fp8-e4m3", "fp8-e5m2") else left


def _multiply_add(array: Array) -> int:
    """Return the real FLOPs of one multiply-add of an array's numbers; both operands have its type."""
    return 8 if array.dtype.startswith("c") else 2


def _dot(computation: Computation, instruction: Instruction) -> Work:
    left = _array(computation, instruction, 0)
    contracted = _dims(instruction.attributes.get("lhs_contracting_dims", ""))
    products = instruction.shapes[0].num_elements * math.prod(left.dims[d] for d in contracted)
    flops = _multiply_add(left) * products
    return Work(kind="matmul", flops=flops, format=_product_format(computation, instruction))


def _ragged_dot(computation: Computation, instruction: Instruction) -> Work:
    """Each row meets the matrix of its own group only, so the groups do not multiply the work."""
    left, right = (_array(computation, instruction, n) for n in (0, 1))
    spent: set[int] = set()
    for attribute in ("rhs_contracting_dims", "rhs_batch_dims", "rhs_group_dims"):
        spent |= set(_dims(instruction.attributes.get(attribute, "")))
    columns = math.prod(size for d, size in enumerate(right.dims) if d not in spent)
    flops = _multiply_add(left) * left.num_elements * columns
    return Work(kind="matmul", flops=flops, format=format_of(left.dtype))


def _multiply(computation: Computation, instruction: Instruction) -> Work | None:
    """XLA writes a dot with a dimension of one as a product, then perhaps a sum: a multiply-add each."""
    if not isinstance(shape := instruction.shape, Array) or shape.dtype[0] in "su":
        return None  # an integer product is the partitioner's arithmetic on offsets
    names = [instruction.op_name]
    if not has_path(instruction):  # on TPUs only the sum over the products keeps it
        names = [
            user.op_name
            for user in computation.instructions
            if user.opcode == "reduce" and user.operands[0].name == instruction.name
        ]
    if not any(name.endswith("dot_general") for name in names):
        return None
    flops = _multiply_add(shape) * shape.num_elements
    return Work(kind="matmul", flops=flops, format=format_of(shape.dtype))


def _gemm(computation: Computation, instruction: Instruction) -> Work:
    numbers = instruction.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
    left = _array(computation, instruction, 0)
    contracted = [left.dims[int(d)] for d in numbers["lhs_contracting_dimensions"]]
    flops = _multiply_add(left) * instruction.shapes[0].num_elements * math.prod(contracted)
    return Work(kind="matmul", flops=flops, format=_product_format(computation, instruction))


def _attention(computation: Computation, instruction: Instruction) -> Work:
    config: dict[str, Any] = instruction.backend_config["cudnn_fmha_backend_config"]
    query = _array(computation, instruction, 0)
    scores = [int(d) for d in config["intermediate_tensor_shape"]["dimensions"]]
    one = 2 * math.prod(scores) * query.dims[-1]
    if "CAUSAL" in config["mask_type"]:
        one //= 2
    backward = "Backward" in instruction.custom_call_target
    return Work(
        kind="attention",
        flops=one * (5 if backward else 2),
        format=format_of(query.dtype),
        recompute_flops=one if backward else 0,
    )


def _convolution(computation: Computation, instruction: Instruction) -> Work:
    image, kernel = (_array(computation, instruction, n) for n in (0, 1))
    flops = _convolution_flops(instruction, image=image, kernel=kernel, result=instruction.shapes[0])
    return Work(kind="convolution", flops=flops, format=format_of(image.dtype))


def _cudnn_convolution(computation: Computation, instruction: Instruction) -> Work:
    """The three cuDNN calls keep the forward convolution's window and labels; the roles change."""
    first, second = (_array(computation, instruction, n) for n in (0, 1))
    result, target = instruction.shapes[0], instruction.custom_call_target
    if target.startswith("__cudnn$convBackwardFilter"):
        arrays = {"image": first, "result": second, "kernel": result}
    elif target.startswith("__cudnn$convBackwardInput"):
        arrays = {"result": first, "kernel": second, "image": result}
    else:
        arrays = {"image": first, "kernel": second, "result": result}
    flops = _convolution_flops(instruction, **arrays)
    return Work(kind="convolution", flops=flops, format=format_of(first.dtype))


def _convolution_flops(instruction: Instruction, *, image: Array, kernel: Array, result: Array) -> int:
    """A multiply-add x batch x input x output features x pairs of positions that meet a real element.

    As XLA's HloCostAnalysis::HandleConvolution counts; a TPU's matmul is the case without a window.
    """
    labels = re.match(r"([^_]+)_([^-]+)->(.+)$", instruction.attributes["dim_labels"])
    assert labels, f"%{instruction.name}: dim_labels {instruction.attributes['dim_labels']!r}"
    in_labels, kernel_labels, out_labels = labels.groups()
    window = _window(instruction.attributes.get("window", "{}"))
    pairs = 1
    for label in (c for c in kernel_labels if c.isdigit()):
        number = int(label)
        pairs *= _meeting_pairs(
            size=image.dims[in_labels.index(label)],
            window=kernel.dims[kernel_labels.index(label)],
            outputs=result.dims[out_labels.index(label)],
            stride=_of(window, "stride", number, 1),
            low=_of(window, "pad", number, 0),
            base_dilation=_of(window, "lhs_dilate", number, 1),
            window_dilation=_of(window, "rhs_dilate", number, 1),
        )
    batch_groups = int(instruction.attributes.get("batch_group_count", "1"))
    batch = image.dims[in_labels.index("b")] // batch_groups
    features = kernel.dims[kernel_labels.index("i")] * kernel.dims[kernel_labels.index("o")]
    return _multiply_add(image) * batch * features * pairs


def _window(text: str) -> dict[str, list[int]]:
    """Each field of a window by spatial dimension; of "pad=1_2x0_0" the low side (1, 0)."""
    fields = re.findall(r"(\w+)=(\S+)", text.strip("{}"))
    return {key: [int(part.split("_")[0]) for part in value.split("x")] for key, value in fields}


def _of(window: dict[str, list[int]], key: str, number: int, otherwise: int) -> int:
    return window[key][number] if key in window else otherwise


@functools.lru_cache(maxsize=10_000)
def _meeting_pairs(
    *, size: int, window: int, outputs: int, stride: int, low: int, base_dilation: int, window_dilation: int
) -> int:
    """How many (output, window) positions along one dimension meet an element, no hole or padding."""
    last = (size - 1) * base_dilation
    pairs = 0
    for tap in range(window):
        offset = tap * window_dilation - low
        first = max(0, -(offset // stride))  # the least output with output x stride + offset >= 0
        final = min(outputs - 1, (last - offset) // stride)
        if base_dilation == 1:
            pairs += max(0, final - first + 1)
        else:
            pairs += sum((o * stride + offset) % base_dilation == 0 for o in range(first, final + 1))
    return pairs


_Rule = Callable[[Computation, Instruction], Work | None]
_OPCODE_RULES: dict[str, _Rule] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": _ragged_dot,
    "multiply": _multiply,
    "convolution": _convolution,
}
_TARGET_RULES: tuple[tuple[str, _Rule], ...] = (
    ("__cublas$gemm", _gemm),
    ("__cublas$lt$matmul", _gemm),
    ("__cudnn$conv", _cudnn_convolution),
    ("__cudnn$fmha", _attention),
)


CLASSES = ("arithmetic", "transcendental", "comparison", "reduction", "conversion", "integer")
TRANSCENDENTAL = frozenset((
    "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power", "sqrt", "rsqrt",
    "cbrt", "tanh", "sine", "cosine", "tan", "atan2", "erf", "acos", "acosh", "asin", "asinh", "atanh",
    "cosh", "sinh",
))  # fmt: skip
COMPARISON = frozenset(("compare", "select", "clamp", "is-finite"))
CONVERSION = frozenset(("convert", "reduce-precision", "stochastic-convert"))
ARITHMETIC = frozenset((
    "add", "subtract", "multiply", "divide", "negate", "maximum", "minimum", "abs", "sign", "remainder",
    "floor", "ceil", "round-nearest-afz", "round-nearest-even", "and", "or", "xor", "not", "shift-left",
    "shift-right-arithmetic", "shift-right-logical", "popcnt", "count-leading-zeros", "complex", "real",
    "imag",
))  # fmt: skip
_FLOATING = ("f", "b", "c")  # f32, bf16, c64; not pred, s32, u8


def elementwise_of(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[str, int] | None:
    """The class and count of an instruction run once on one device; None where it does no such work.

    What `work_of` counts as a product is left to it: whoever calls asks there first.
    """
    opcode = instruction.opcode
    if opcode in _COMBINING:
        return "reduction", _combined(program, computation, instruction)
    if opcode == "map":
        return "arithmetic", instruction.shapes[0].num_elements * _operations(
            program, instruction, "to_apply"
        )
    if opcode in TRANSCENDENTAL:
        name = "transcendental"
    elif opcode in COMPARISON:
        name = "comparison"
    elif opcode in CONVERSION:
        name = "conversion"
    elif opcode in ARITHMETIC:
        name = "arithmetic" if instruction.shapes[0].dtype.startswith(_FLOATING) else "integer"
    else:
        return None
    return name, instruction.shapes[0].num_elements


def _combined(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Operations with which a reduction, a window or a scatter combines elements."""
    shapes = [leaves_of(shape)[0] for shape in computation.operand_shapes(instruction)]
    result, opcode = instruction.shapes[0], instruction.opcode
    if opcode == "reduce":
        # A sum over the products of a dot is counted with them: a multiply-add is two.
        if instruction.op_name.endswith("dot_general"):
            return 0
        return max(0, shapes[0].num_elements - result.num_elements) * _operations(
            program, instruction, "to_apply"
        )
    if opcode == "reduce-window":
        pairs = result.num_elements * (_window_size(instruction) - 1)
        return pairs * _operations(program, instruction, "to_apply")
    if opcode == "select-and-scatter":
        source = shapes[1].num_elements
        selected = source * (_window_size(instruction) - 1) * _operations(program, instruction, "select")
        return selected + source * _operations(program, instruction, "scatter")
    return _updates(shapes) * _operations(program, instruction, "to_apply")


def _updates(shapes: list[Array]) -> int:
    """Of a scatter's operands (targets, indices, updates): the elements of one update."""
    return shapes[-1].num_elements


def _operations(program: Program, instruction: Instruction, role: str) -> int:
    """How many operations a combining computation does: one for a sum, several for an argmax."""
    found = 0
    for name in instruction.called[role]:
        inner = program.computations[name]
        counts = (elementwise_of(program, inner, each) for each in inner.instructions)
        found += sum(count[1] for count in counts if count is not None)
    return found


def _window_size(instruction: Instruction) -> int:
    fields = dict(part.split("=") for part in instruction.attributes["window"].strip("{}").split())
    return math.prod(int(size) for size in fields["size"].split("x"))


_COMBINING = frozenset(("reduce", "reduce-window", "select-and-scatter", "scatter"))
