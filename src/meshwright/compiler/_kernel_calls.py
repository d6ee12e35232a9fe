"""Describe kernels that no compiler looks into, and hold the rules that users register for them.

A Pallas kernel or a foreign-function call is one custom call of the compiled program. Its FLOPs are counted
where it is traced (`worker/_traced_kernels.py`), and found again in the compiled program by the arrays that
it takes and returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import InputError

from ._record import Shape

PALLAS, FOREIGN = "pallas_call", "ffi_call"
"""Primitives of JAX that call a kernel."""
MAPPED = "mpmd_map"
"""The primitive of kernels in Pallas' Mosaic for GPUs, whose warps divide the work by code of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """A call of a kernel as its rule sees it: on one device.

    `name`: the kernel's name, or the target of a foreign-function call. `grid`: a Pallas kernel's; None for a
    size that only the run knows; empty for a foreign-function call.
    """

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    grid: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFlops:
    """FLOPs of one run of a kernel on one device.

    `model`: what the mathematics needs. `executed`: what the kernel computes, with masked blocks, padding and
    recomputation; as `model` if not given. `recomputed`: the part of it that repeats the forward pass.
    """

    model: int
    executed: int | None = None
    recomputed: int = 0


KernelRule = Callable[[KernelCall], KernelFlops]


_REGISTERED: dict[str, KernelRule] = {}


def register_kernel(name: str, rule: KernelRule) -> None:
    """Count the kernels whose name begins with `name` by your own rule from now on.

    The rule comes before all others, and reaches model FLOPs, executed FLOPs and the predicted time of
    functions that are traced in this process. `weigh --rules FILE` runs a file with such calls for programs
    that are weighed by name.

    Args:
        name: the beginning of a Pallas kernel's name (`pallas_call(..., name=...)`, else that of its
            function), or of the target of `jax.ffi.ffi_call`.
        rule: from a `KernelCall` to its `KernelFlops`, of one run on one device.

    Raises:
        InputError: the name is empty, or `rule` is not a function.

    >>> from meshwright import KernelCall, KernelFlops
    >>> def my_matmul(call: KernelCall) -> KernelFlops:
    ...     (_, (m, k)), (_, (_, n)) = call.operands
    ...     return KernelFlops(model=2 * m * k * n)
    >>> register_kernel("my_matmul", my_matmul)
    """
    if not name:
        raise InputError("the rule for a kernel has no name", hint="give the beginning of the kernel's name")
    if not callable(rule):
        raise InputError(
            f"the rule for {name!r} is not a function: {rule!r}", hint="give a function of a KernelCall"
        )
    _REGISTERED[name] = rule


def registered_rule(name: str) -> KernelRule | None:
    """Return the registered rule with the longest beginning of a kernel's name; None if there is none."""
    beginnings = [beginning for beginning in _REGISTERED if name.startswith(beginning)]
    return _REGISTERED[max(beginnings, key=len)] if beginnings else None
