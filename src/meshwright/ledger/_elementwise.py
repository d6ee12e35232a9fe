"""Operations of one instruction that are no multiply-adds of a product: elementwise work, by class.

Counted as XLA's own cost analysis does (xla/service/hlo_cost_analysis.cc): one for each element of the
result, a division like an addition. A reduction counts what it combines: for each element that disappears,
each operation of its computation. Beside XLA's rule: `arithmetic` is of floating numbers alone, and integer
and logical operations (addresses, masks, random bits) have a class of their own, for they are no FLOPs.
Not counted: what a library call does inside (the softmax of a fused attention, a product's epilogue), the
sums of a collective, random bits. Sorts and Fourier transforms have no rule: `unpriced_work` names them.
"""

from __future__ import annotations

import math

from .hlo import Array, Computation, Instruction, Program, leaves_of

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
