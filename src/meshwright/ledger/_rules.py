"""Count the arithmetic of one HLO instruction: products, elementwise work, and users' custom calls.

All counts are for one run on one device, from the instruction's shapes and attributes alone.

Products (`work_of`). Counted: dot (also ragged and block-scaled), convolution, the library calls that XLA's
GPU backend puts in their place, cuDNN attention, and products that XLA's simplifier made from a dot. A
multiply-add is two FLOPs, and eight for complex numbers (four products, four sums). Not counted: a
convolution's taps on padding, as in XLA's own cost analysis; model FLOPs count them.

Elementwise work (`elementwise_of`), by class. Counted: as in XLA's own cost analysis
(xla/service/hlo_cost_analysis.cc), one operation for each element of the result, a division like an addition.
A reduction counts each operation of its computation once for each element that disappears. Unlike in XLA,
`arithmetic` holds only floating-point operations. Integer and logical operations (addresses, masks, random
bits) have a class of their own, because they are not FLOPs. Not counted: work inside a library call (the
softmax of a fused attention, a product's epilogue), the sums of a collective, random-bit generators.

Users add rules for custom calls, into which XLA cannot look, with `register_call`. `unpriced_work` names
what could do arithmetic and has no rule, sorts and Fourier transforms included.
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
    """Multiply-adds of one kind in one instruction.

    `format`: the number format of the first operand; fp8-e5m2 for a product of fp8-e4m3 and fp8-e5m2.
    `recompute_flops`: the part of `flops` that repeats work of the forward pass.
    """

    kind: str  # matmul | convolution | attention
    flops: int
    format: str
    recompute_flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A custom call of the compiled program, on one device; tuples are flattened."""

    target: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    backend_config: str


Rule = Callable[[Call], Work]
_RULES: dict[str, Rule] = {}


def register_call(target: str, rule: Rule) -> None:
    """Count the custom calls whose target begins with `target` by your own rule from now on.

    Your rule takes precedence over the built-in rules. The ledger's executed FLOPs, and the time predicted
    from them, use it. The traced program's model FLOPs still list the call as unpriced.

    Args:
        target: the beginning of `custom_call_target`, as the ledger's `unpriced` names it.
        rule: a function that takes the `Call` and returns its `Work` on one device.

    Raises:
        InputError: the target is empty, or `rule` is not a function.
    """
    if not target:
        raise InputError("a rule for a custom call without a name", hint="name the beginning of its target")
    if not callable(rule):
        raise InputError(
            f"the rule for {target!r} is no function: {rule!r}", hint="give a function of a Call"
        )
    _RULES[target] = rule


def registered(target: str) -> Rule | None:
    """Return the user's rule whose registered beginning of `target` is longest; None if none matches."""
    found = [beginning for beginning in _RULES if target.startswith(beginning)]
    return _RULES[max(found, key=len)] if found else None


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
    "GatherScatterIndicesBitpacked",
))  # fmt: skip
OPCODES_WITHOUT_RULE = frozenset(("cholesky", "triangular-solve", "fft", "sort", "topk"))


def work_of(computation: Computation, instruction: Instruction) -> Work | None:
    """Return the multiply-adds of `instruction` itself, without what it calls; None where it has none.

    Sources: for dot and convolution, their definitions at https://openxla.org/xla/operation_semantics. For
    attention, Dao et al. 2022, arXiv 2205.14135: two matmuls forward, and five backward, of which one repeats
    the scores. Each counts by half where the mask is causal.
    """
    rule = _OPCODE_RULES.get(instruction.opcode)
    if instruction.opcode == "custom-call":
        target = instruction.custom_call_target
        if (own := registered(target)) is not None:
            return own(_call(computation, instruction))
        rule = next((rule for prefix, rule in _TARGET_RULES if target.startswith(prefix)), None)
    return rule(computation, instruction) if rule else None


def unpriced_work(computation: Computation, instruction: Instruction) -> str | None:
    """Describe an instruction that could do multiply-adds and has no rule; return None for any other."""
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
    """Return the project's name ("bf16", "fp8-e4m3") for the number format of an element type."""
    return FORMATS.get(dtype, dtype)


def _array(computation: Computation, instruction: Instruction, number: int) -> Array:
    return leaves_of(computation.operand_shape(instruction.operands[number]))[0]


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in re.findall(r"\d+", text))


def _product_format(computation: Computation, instruction: Instruction) -> str:
    """Return the left operand's format, or E5M2 for a product of E4M3 and E5M2.

    E5M2 is the gradient's format. The compiler may swap the sides, so the gradient may be on either.
    """
    left, right = (format_of(_array(computation, instruction, n).dtype) for n in (0, 1))
    return right if (left, right) == ("fp8-e4m3", "fp8-e5m2") else left


def _multiply_add(array: Array) -> int:
    """Return the real FLOPs of one multiply-add of an array's numbers; both operands have that type."""
    return 8 if array.dtype.startswith("c") else 2


def _dot(computation: Computation, instruction: Instruction) -> Work:
    left = _array(computation, instruction, 0)
    contracted = _dims(instruction.attributes.get("lhs_contracting_dims", ""))
    products = instruction.shapes[0].num_elements * math.prod(left.dims[d] for d in contracted)
    flops = _multiply_add(left) * products
    return Work(kind="matmul", flops=flops, format=_product_format(computation, instruction))


def _ragged_dot(computation: Computation, instruction: Instruction) -> Work:
    """Count a ragged dot: each row meets only its own group's matrix, so groups do not multiply the work."""
    left, right = (_array(computation, instruction, n) for n in (0, 1))
    spent: set[int] = set()
    for attribute in ("rhs_contracting_dims", "rhs_batch_dims", "rhs_group_dims"):
        spent |= set(_dims(instruction.attributes.get(attribute, "")))
    columns = math.prod(size for d, size in enumerate(right.dims) if d not in spent)
    flops = _multiply_add(left) * left.num_elements * columns
    return Work(kind="matmul", flops=flops, format=format_of(left.dtype))


def _multiply(computation: Computation, instruction: Instruction) -> Work | None:
    """Count an elementwise product that XLA made from a dot with a dimension of one.

    A sum may follow it. Each element of the product counts as one multiply-add.
    """
    if not isinstance(shape := instruction.shape, Array) or shape.dtype[0] in "su":
        return None  # an integer product is the partitioner's arithmetic on offsets
    names = [instruction.op_name]
    if not has_path(instruction):  # on TPUs only the sum over the products keeps the path
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
    """Count one of cuDNN's three convolution calls.

    All three keep the forward convolution's window and labels. Only the roles of the arrays change.
    """
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
    """Return multiply-add x batch x input features x output features x pairs that meet a real element.

    A pair is an output position and a window position. XLA's HloCostAnalysis::HandleConvolution counts the
    same. A TPU's matmul is the case without a window.
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
    """Parse each field of a window by spatial dimension; "pad=1_2x0_0" keeps only its low side (1, 0)."""
    fields = re.findall(r"(\w+)=(\S+)", text.strip("{}"))
    return {key: [int(part.split("_")[0]) for part in value.split("x")] for key, value in fields}


def _of(window: dict[str, list[int]], key: str, number: int, otherwise: int) -> int:
    return window[key][number] if key in window else otherwise


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
_FLOATING = ("f", "b", "c")  # first letters of f32, bf16, c64; not of pred, s32, u8


def elementwise_of(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[str, int] | None:
    """Return the class and number of operations of one run on one device; None where it has none.

    Call this only if `work_of` returns None, because `work_of` counts elementwise products made from a dot.
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
    """Count the operations with which a reduction, a window or a scatter combines elements."""
    shapes = [leaves_of(shape)[0] for shape in computation.operand_shapes(instruction)]
    result, opcode = instruction.shapes[0], instruction.opcode
    if opcode == "reduce":
        # The sum over a dot's products is counted with them already: a multiply-add is two FLOPs.
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
    """Return the elements of one update of a scatter, whose operands are targets, indices, updates."""
    return shapes[-1].num_elements


def _operations(program: Program, instruction: Instruction, role: str) -> int:
    """Count the operations of a combining computation: one for a sum, several for an argmax."""
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
