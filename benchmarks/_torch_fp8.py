"""The blocks' products in eight bits in PyTorch, by the recipe of `meshwright.trainer.models.eight_bits`.

E4M3 forward, E5M2 for gradients, each tensor scaled by a power of two after what it holds now. The product is
`torch._scaled_mm`, on which torchao's `Float8Linear` is built too: it wants rows of the first operand and
columns of the second to be contiguous, and sizes that are multiples of 16. Sums are fast (in fewer bits)
forward and exact backward, torchao's default (https://github.com/pytorch/ao/tree/main/torchao/float8).
"""

from __future__ import annotations

from typing import Any

import torch

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def has_scaled_products() -> bool:
    """Return whether this PyTorch has scaled products of eight-bit tensors; the function is not public."""
    return hasattr(torch, "_scaled_mm")


def _quantised(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    most = x.abs().amax().float()
    mantissa, exponent = torch.frexp(torch.where(most == 0, 1.0, most / torch.finfo(dtype).max))
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())  # 0.5 <= mantissa < 1
    return (x.float() / scale).to(dtype), scale


def _product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    y: torch.Tensor,
    y_scale: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """x [m, k] against y [n, k], both with contiguous rows: [m, n]."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x.contiguous(),
        y.contiguous().t(),
        scale_a=x_scale,
        scale_b=y_scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x [m, in], weight [out, in]; both in the format of the result."""
        (x8, x_scale), (weight8, weight_scale) = _quantised(x, FORWARD), _quantised(weight, FORWARD)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        return _product(x8, x_scale, weight8, weight_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Of x and of the weight."""
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        narrow, scale = _quantised(gradient, BACKWARD)
        return (
            _product(narrow, scale, weight8.t(), weight_scale, gradient.dtype, fast=False),
            _product(narrow.t(), scale, x8.t(), x_scale, gradient.dtype, fast=False),
        )


def fp8_product(x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
    """x [..., in] to [..., out] in bfloat16, multiplied in eight bits; the bias is added after."""
    rows = x.to(torch.bfloat16).flatten(0, -2)
    y = _Product.apply(rows, linear.weight.to(torch.bfloat16))
    y = y.view(*x.shape[:-1], -1)
    return y if linear.bias is None else y + linear.bias.to(torch.bfloat16)
