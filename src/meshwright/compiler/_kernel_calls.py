"""Describe kernels that no compiler looks into, and hold the rules that users register for them.

A Pallas kernel or a foreign-function call is one custom call of the compiled program. Its FLOPs are counted
where it is traced (`worker/_traced_kernels.py`), and found again in the compiled program by the arrays that
it takes and returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files import MOST_SOURCE_BYTES, read_text, reason

Shape = tuple[str, tuple[int, ...]]  # element type as XLA names it ("bf16"), and dimensions on one device


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKernel:
    """A kernel of a traced program: its call, and the FLOPs of one run on one device.

    `kind`: matmul | attention. `source`: where the FLOPs come from, in words. `format`: the number format in
    which it multiplies. `head_size`, `length`: of attention, 0 for others.
    """

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    flops: int
    recompute_flops: int
    kind: str
    format: str
    source: str
    head_size: int = 0
    length: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesFile:
    """A Python file that registers rules for kernels, as it was read."""

    path: str
    text: str

    @staticmethod
    def read(path: str | Path) -> RulesFile:
        """Read a file.

        Raises:
            InputError: there is no such file, or it is no text.
        """
        try:
            return RulesFile(path=str(path), text=read_text(path, MOST_SOURCE_BYTES))
        except (OSError, ValueError) as failed:
            raise InputError(
                f"the rules in {path} cannot be read: {reason(failed)}",
                hint="name a Python file that calls meshwright.register_kernel(name, rule)",
            ) from failed

    def register(self) -> None:
        """Run the file in this process.

        Raises:
            InputError: it fails.
        """
        try:
            exec(compile(self.text, self.path, "exec"), {"__name__": "rules", "__file__": self.path})
        except Exception as failed:
            raise InputError(
                f"the rules in {self.path} failed: {type(failed).__name__}: {failed}",
                hint="it is a Python file that calls meshwright.register_kernel(name, rule)",
            ) from failed
