"""FLOPs of one PyTorch operation, from the shapes and attributes of its call alone. No torch is imported.

Counted: matrix products, convolutions, attention, recurrent layers. A multiply-add is two, of complex numbers
eight. The conventions are those of the ledger's model FLOPs (`meshwright.ledger`): a convolution counts every
tap of its window at every output, those on padding included.
Not counted: elementwise arithmetic, reductions, sorts (`_silent` names them). A rule gives None where the
work depends on data; such a call is listed as unknown, as is any operation with neither a rule nor silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from . import _attention
from ._calls import Call, format_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The FLOPs of one call; `recomputed_flops` is the part that repeats work of the forward pass."""

    flops: int
    recomputed_flops: int = 0
    format: str


Flops = int | tuple[int, int] | None  # FLOPs, perhaps with the part that repeats the forward pass


def work_of(call: Call) -> Work | None:
    """The FLOPs of a call by its rule; None where it has no rule, or the rule cannot tell.

    Source: the operations' definitions in PyTorch's native_functions.yaml.
    """
    rule = RULES.get(call.name.removeprefix("aten."))
    found = None if rule is None else rule(call)
    if found is None:
        return None
    flops, recomputed = found if isinstance(found, tuple) else (found, 0)
    # PyTorch multiplies no complex numbers with real ones: of a call's tensors all or none are complex.
    real = 4 if any(tensor.dtype.is_complex for tensor in call.tensors()) else 1
    return Work(flops=real * flops, recomputed_flops=real * recomputed, format=_format(call))


def _format(call: Call) -> str:
    """That of the first operand of the product, not of a bias added to it."""
    named = (call.arguments.get(name) for name in ("mat1", "batch1", "mat"))
    first = next((tensor for tensor in named if tensor is not None), None)
    return format_name((call.tensors()[0] if first is None else first).dtype)


def _product(left: str, right: str) -> Callable[[Call], Flops]:
    """[..., m, k] x [..., k, n], [m, k] x [k], or [k] x [k]; leading dimensions are the left one's."""

    def rule(call: Call) -> Flops:
        rows, columns = call.shape(left), call.shape(right)
        packed = 2 if str(call[left].dtype).endswith("_x2") else 1  # two narrow numbers in one element
        return 2 * packed * math.prod(rows) * (columns[-1] if len(columns) > 1 else 1)

    return rule


def _outer(call: Call) -> Flops:
    return 2 * math.prod(call.shape("vec1")) * math.prod(call.shape("vec2"))


def _grouped(call: Call) -> Flops:
    """Each row meets the matrix of its own group only, so the groups do not multiply the work."""
    left, right = call.shape("self"), call.shape("mat2")
    if len(left) == 3 and len(right) == 2:  # the groups divide the right matrix's columns
        return 2 * left[-2] * left[-1] * right[-1]
    return 2 * math.prod(left) * right[-1]


def _each_product(call: Call) -> Flops:
    pairs = zip(call["self"], call["mat2"], strict=True)
    return sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right in pairs)


def _convolution(call: Call) -> Flops:
    image, kernel = call.shape("input"), call.shape("weight")
    return _convolution_flops(call, image, kernel, tuple(int(size) for size in call.result.shape))


def _convolution_backward(call: Call) -> Flops:
    """The gradients of input and weight each cost what the forward pass does; the bias's is a sum."""
    one = _convolution_flops(call, call.shape("input"), call.shape("weight"), call.shape("grad_output"))
    return one * sum(bool(wanted) for wanted in call["output_mask"][:2])


def _convolution_flops(
    call: Call, image: tuple[int, ...], kernel: tuple[int, ...], result: tuple[int, ...]
) -> int:
    """Two x batch x elements of the kernel x its positions: the outputs, or the inputs if transposed."""
    dims = len(kernel) - 2
    batch = image[0] if len(image) == len(kernel) else 1
    positions = (image if call["transposed"] else result)[-dims:]
    return 2 * batch * math.prod(kernel) * math.prod(positions)


def _recurrent(call: Call) -> int:
    """cuDNN's layers: input and hidden state meet their matrices at each position of each sequence."""
    positions = math.prod(call.shape("input")[:-1])
    return 2 * positions * sum(math.prod(weight.shape) for weight in call["weight"] if weight.dim() == 2)


def _recurrent_backward(call: Call) -> Flops:
    """The last of the mask asks for the weights' gradients; cuDNN always makes those of the input."""
    return _recurrent(call) * (1 + bool(call["output_mask"][3]))


def _encoder_layer(call: Call) -> Flops:
    """PyTorch's fused inference kernel: projections, attention counted whole, two layers of the MLP."""
    batch, length, width = call.shape("src")
    names = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    weights = sum(math.prod(call.shape(name)) for name in names)
    return 2 * batch * length * weights + 4 * batch * length * length * width


def _self_attention_layer(call: Call) -> Flops:
    batch, length, width = call.shape("query")
    keys = call.shape("key")[1]
    rows_by_keys = 4 * batch * length * keys * width
    project_in = 2 * batch * (length + 2 * keys) * width * width
    return project_in + rows_by_keys + 2 * batch * length * math.prod(call.shape("proj_weight"))


RULES: dict[str, Callable[[Call], Flops]] = {
    "mm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2"),
    "_addmm_activation": _product("mat1", "mat2"),
    "bmm": _product("self", "mat2"),
    "baddbmm": _product("batch1", "batch2"),
    "addbmm": _product("batch1", "batch2"),
    "mv": _product("self", "vec"),
    "addmv": _product("mat", "vec"),
    "dot": _product("self", "tensor"),
    "vdot": _product("self", "other"),
    "addr": _outer,
    "_int_mm": _product("self", "mat2"),
    "_scaled_mm": _product("self", "mat2"),
    "_scaled_mm_v2": _product("self", "mat2"),
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_grouped_mm_v2": _grouped,
    "_foreach_mm": _each_product,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_native_multi_head_attention": _self_attention_layer,
    **_attention.ATTENTION_RULES,
}
RULES |= {f"{name}_": RULES[name] for name in ("addmm", "baddbmm", "addbmm", "addmv", "addr")}
