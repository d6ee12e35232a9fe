"""Choose the kernels that PyTorch takes on the target's GPUs, for fake tensors that live on a CPU.

Attention is that of PyTorch's rules for CUDA (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): flash
attention in 16-bit formats without a mask, memory-efficient attention with one or in fp32, else products.
cuDNN's attention, which some releases take first on Hopper, keeps the same arrays as flash attention.
RMS norms are one kernel that keeps a number for each row, dropout keeps a byte for each element, and
optimizers update all parameters in one call. Under autocast, attention and RMS norms get their operands as
CUDA's rules cast them. Scans of Mamba are one kernel (`_scans`).
Not chosen: algorithms of cuDNN's convolutions and cuBLAS's products, and cuDNN's workspaces.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention

from meshwright.hardware import Chip

from ._autocast import under_autocast
from ._flex import fused_flex_attention
from ._scans import fused_scans

HALVES = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # of flash attention
FLASH_CAPABILITY = (8, 0)  # Ampere
AS_WRITTEN = "What torch.compile compiles counts as it was written; its fused kernels keep and move less."
aten = torch.ops.aten


@contextlib.contextmanager
def kernels_of(chip: Chip, note: Callable[[str], None]) -> Iterator[None]:
    """Choose kernels for `chip` in the block; for a CPU they are the CPU's.

    `note` is told what is not exact.
    """
    if chip.platform == "cpu":
        yield
        return
    has_flash = chip.target is None or chip.target.compute_capability >= FLASH_CAPABILITY
    functional = torch.nn.functional
    # Functions are replaced where modules look them up. A `TorchFunctionMode` would not hold while
    # checkpointed blocks run again in the backward pass.
    replaced: dict[str, Any] = {
        "scaled_dot_product_attention": functools.partial(
            under_autocast, "scaled_dot_product_attention", functools.partial(_attention, has_flash)
        ),
        "dropout": functools.partial(_dropout, functional.dropout),
        "rms_norm": functools.partial(
            under_autocast, "rms_norm", functools.partial(_rms_norm, functional.rms_norm)
        ),
    }
    with (
        _whole_updates(),
        fused_flex_attention(note),
        fused_scans(note),
        mock.patch.multiple(functional, **replaced),
    ):
        yield


def _attention(
    has_flash: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    tensors = (query, key, value)
    kernel = _kernel(has_flash, tensors, attn_mask, is_causal=is_causal, grouped=enable_gqa)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if kernel == SDPBackend.FLASH_ATTENTION:
        width = query.shape[-1]
        padded = tuple(_pad(tensor, 8) for tensor in tensors)
        seen = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return seen if seen.shape[-1] == width else seen[..., :width]
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        mask = None if attn_mask is None else _expanded(attn_mask, query, key)
        keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return aten._scaled_dot_product_efficient_attention(
            *tensors, mask, keeps, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        *tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _kernel(
    has_flash: bool,
    tensors: tuple[torch.Tensor, ...],
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    grouped: bool,
) -> SDPBackend:
    """Return the kernel that PyTorch takes on CUDA."""
    query, key, _ = tensors
    plain = all(t.dim() == 4 and not t.is_nested and (t.stride(-1) == 1 or t.shape[-1] == 1) for t in tensors)
    backends = torch.backends.cuda
    if not plain or len({t.dtype for t in tensors}) > 1 or query.shape[0] != key.shape[0]:
        return SDPBackend.MATH
    square = query.shape[-2] == key.shape[-2]
    widths = {t.shape[-1] for t in tensors}
    heads = {t.shape[-3] for t in tensors}
    flash = has_flash and backends.flash_sdp_enabled() and query.dtype in HALVES and mask is None
    shared = len(heads) == 1 or (grouped and query.shape[-3] % key.shape[-3] == 0)
    narrow = len(widths) == 1 and max(widths) <= WIDEST_HEAD
    if flash and narrow and shared and (square or not is_causal):
        return SDPBackend.FLASH_ATTENTION
    step = 8 if query.dtype in HALVES else 4
    aligned = all(width % step == 0 for width in widths)
    fits = query.dtype in (*HALVES, torch.float32) and aligned and len(heads) == 1
    if backends.mem_efficient_sdp_enabled() and fits and (mask is None or not is_causal):
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def _pad(tensor: torch.Tensor, step: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % step
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _expanded(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as numbers to be added, one for each pair of positions, as the kernel takes it."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    if mask.shape[-1] % 8:  # the kernel reads rows in steps, so PyTorch copies the mask into longer ones
        mask = _pad(mask, 8)[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _dropout(
    original: Callable[..., Any],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not training or inplace or not 0 < p < 1 or not input.numel():
        return original(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _rms_norm(
    original: Callable[..., Any],
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if type(input) is not FakeTensor or (weight is not None and weight.dtype != input.dtype):
        return original(input, normalized_shape, weight, eps)
    return _FusedNorm.apply(input, len(tuple(normalized_shape)), weight)


class _FusedNorm(torch.autograd.Function):
    """An RMS norm as one kernel: it keeps its input, its weight, and one number for each row."""

    @staticmethod
    def forward(
        context: Any, input: torch.Tensor, num_dims: int, weight: torch.Tensor | None
    ) -> torch.Tensor:
        rows = (*input.shape[: input.dim() - num_dims], *(1,) * num_dims)
        context.save_for_backward(input, input.new_empty(rows, dtype=torch.float32), weight)
        context.num_dims = num_dims
        return input.clone()  # which reads and writes as many bytes

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, scale, weight = context.saved_tensors
        shape, wanted = input.shape[input.dim() - context.num_dims :], [True, weight is not None, False]
        # A layer norm's kernels read and write as many bytes.
        of_input, of_weight, _ = aten.native_layer_norm_backward(
            *gradients, input, shape, scale, scale, weight, None, wanted
        )
        return of_input, None, of_weight


@contextlib.contextmanager
def _whole_updates() -> Iterator[None]:
    """Let optimizers take the loops over all parameters in one call that they take on a GPU by default.

    They may also be capturable by CUDA graphs, which PyTorch refuses on a CPU.
    """
    optimizer: Any = sys.modules["torch.optim.optimizer"]  # which torch.optim hides behind its own names
    original, kinds = optimizer._get_foreach_kernels_supported_devices, optimizer._foreach_supported_types
    before = list(kinds)

    def capturable(*args: Any, **kwargs: Any) -> list[str]:
        return [*optimizer_capturable(*args, **kwargs), "cpu"]

    optimizer_capturable = optimizer._get_capturable_supported_devices
    # Each optimizer's file has imported the name.
    holders = [
        each
        for name, each in list(sys.modules.items())
        if name.startswith("torch.optim.") and hasattr(each, "_get_capturable_supported_devices")
    ]
    optimizer._get_foreach_kernels_supported_devices = lambda: [*original(), "cpu"]
    kinds.append(FakeTensor)
    for each in holders:
        setattr(each, "_get_capturable_supported_devices", capturable)  # noqa: B010  private names
    try:
        yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = original
        kinds[:] = before
        for each in holders:
            setattr(each, "_get_capturable_supported_devices", optimizer_capturable)  # noqa: B010


@contextlib.contextmanager
def as_it_was_written(note: Callable[[str], None]) -> Iterator[None]:
    """Run what is compiled by `torch.compile`, before the block or in it, as it was before.

    `note` is told `AS_WRITTEN` if something is compiled in the block, as optimizers of torchao compile their
    step. Flex attention does not count: it runs as the kernel that it is compiled to.
    """

    def leave(model: Any = None, **_: Any) -> Any:
        if model is not flex_attention:
            note(AS_WRITTEN)
        return model if model is not None else lambda function: function

    is_loaded = "torch._dynamo" in sys.modules  # else nothing is compiled yet
    stance = torch.compiler.set_stance("force_eager") if is_loaded else contextlib.nullcontext()
    with mock.patch.object(torch, "compile", leave), stance, _hearing_of_functions(note):
        yield


@contextlib.contextmanager
def _hearing_of_functions(note: Callable[[str], None]) -> Iterator[None]:
    """Tell `note` when a function runs that was compiled before the block."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    original = getattr(frames, "_callback_from_stance", None)
    if original is None:
        yield
        return

    def callback(*args: Any, **kwargs: Any) -> Any:
        function = sys._getframe(1).f_locals.get("fn")
        is_compiled = callable(args[0])  # and not left alone
        if is_compiled and inspect.isfunction(function) and function is not flex_attention:
            note(AS_WRITTEN)
        return original(*args, **kwargs)

    with mock.patch.object(frames, "_callback_from_stance", callback):
        yield


def compiled_parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the parts of a module that `torch.compile` compiles, perhaps the module itself."""
    return [
        getattr(part, "_orig_mod", part)
        for part in module.modules()
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None
    ]


def compiled_paths(module: Any) -> tuple[str, ...]:
    """Return the paths of the parts of a module that are compiled, within what `torch.compile` wraps."""
    if not isinstance(module, torch.nn.Module):
        return ()
    parts = {id(part) for part in compiled_parts(module)}
    root = getattr(module, "_orig_mod", module)
    return tuple(path for path, part in root.named_modules() if id(part) in parts)


def outermost(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that are not parts of other given modules."""
    different = {id(module): module for module in modules}
    inner = {id(part) for module in different.values() for part in module.modules() if part is not module}
    return [module for key, module in different.items() if key not in inner]


@contextlib.contextmanager
def whole_sequences(
    module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> Iterator[bool]:
    """Tell `transformers` that no sequences are packed in one row, if no positions are given.

    It asks so of position numbers that it then made itself, and would look at their values. Yields whether it
    is told.
    """
    masks = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or original is None or is_given(module, inputs, keywords, "position_ids"):
        yield False
        return

    def answer(position_ids: torch.Tensor) -> None:
        original(position_ids)  # whose arrays are freed at once

    setattr(masks, "find_packed_sequence_indices", answer)  # noqa: B010  of a module that is not imported here
    try:
        yield True
    finally:
        setattr(masks, "find_packed_sequence_indices", original)  # noqa: B010


def is_given(module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], name: str) -> bool:
    """Return whether the inputs of a module's `forward` have a value for one of its arguments."""
    try:
        bound = inspect.signature(module.forward).bind(*inputs, **keywords)
    except (TypeError, ValueError):
        return name in keywords
    return bound.arguments.get(name) is not None or bound.arguments.get("kwargs", {}).get(name) is not None


def grouped_product(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *others: Any, **options: Any
) -> torch.Tensor:
    """Return the fake result of PyTorch's `_grouped_mm`, whose own rule for shapes knows bf16 alone."""
    if left.dtype == torch.bfloat16:
        return aten._grouped_mm(left, right, offs, *others, **options)
    if left.dim() == right.dim() == 2:
        assert offs is not None, "groups of two matrices need their ends"
        return left.new_empty((offs.shape[0], left.shape[0], right.shape[1]))
    rows = left.shape[1:2] if right.dim() == 2 else left.shape[:-1]  # the groups divide the right columns
    return left.new_empty((*rows, right.shape[-1]))


def counted_bins(
    given: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Return the fake result of `bincount`, of which PyTorch knows no shape: it is as long as is asked.

    A module of experts counts the rows of each so, and no number in it is beyond the last expert.
    """
    if not minlength:
        return aten.bincount(given, weights, minlength)
    wide = torch.int64 if weights is None else torch.float64
    kept = weights is not None and weights.dtype == torch.float32
    return given.new_empty((minlength,), dtype=torch.float32 if kept else wide)
