"""Run the selective scan of Mamba's first release as the one kernel of mamba-ssm, which a CPU does not have.

Without that package `transformers` computes one position after another, 8,192 of them in Jamba. The kernel
keeps its inputs, its result before the gate, and for every `CHUNK` positions two numbers in float32 of each
state (mamba_ssm/ops/selective_scan_interface.py and csrc/selective_scan/selective_scan.cpp in
https://github.com/state-spaces/mamba). No matrix is multiplied, so no FLOPs are counted; its time is that of
its bytes, which is a lower bound: it computes an exponential for each state and position.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

CHUNK = 2048  # positions
NAME = "mamba_selective_scan"  # of the function in the modules of transformers
NOTE = (
    "Mamba's scans count as the kernel of mamba-ssm, timed by their bytes alone. Without that package "
    "transformers computes one position after another; with it Mamba and Falcon Mamba, whose mamba_inner_fn "
    "computes the convolution again, keep less than is counted."
)
_ARRAYS = "Tensor u, Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? delta_bias"
_OWN = torch.library.Library("meshwright", "FRAGMENT")
_OWN.define(f"selective_scan({_ARRAYS}) -> Tensor[]")
_OWN.define(f"selective_scan_backward(Tensor grad_out, {_ARRAYS}, Tensor states, Tensor? out) -> Tensor[]")


def _forward(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    batch, width, length = u.shape
    states = u.new_empty((batch, width, -(-length // CHUNK), 2 * a.shape[1]), dtype=torch.float32)
    results = [torch.empty_like(delta), states]
    return results if z is None else [*results, torch.empty_like(z)]


def _backward(
    grad_out: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *others: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return gradients of the arrays that are given; of `b` and `c` in float32."""
    wide = [torch.empty_like(each, dtype=torch.float32) for each in (b, c)]
    given = [each for each in others[:3] if each is not None]
    return [*map(torch.empty_like, (u, delta, a)), *wide, *map(torch.empty_like, given)]


_OWN.impl("selective_scan", _forward, "Meta")
_OWN.impl("selective_scan_backward", _backward, "Meta")


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, *given: torch.Tensor | None) -> torch.Tensor:
        arrays = [each if each is None or each.stride(-1) == 1 else each.contiguous() for each in given]
        out, states, *gated = torch.ops.meshwright.selective_scan(*arrays)
        context.save_for_backward(*arrays, states, out if gated else None)
        return gated[0] if gated else out

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,), saved = gradients, context.saved_tensors
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        u, delta, a, b, c, *others = torch.ops.meshwright.selective_scan_backward(gradient, *saved)
        later = iter(others)
        rest = (None if each is None else next(later) for each in saved[5:8])
        return u, delta, a, b.to(saved[3].dtype), c.to(saved[4].dtype), *rest


@contextlib.contextmanager
def fused_scans(note: Callable[[str], None]) -> Iterator[None]:
    """Run the selective scans of `transformers` as their kernel in the block.

    Args:
        note: called with `NOTE` for each scan that runs.
    """
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models.") and NAME in vars(module):
                stack.enter_context(mock.patch.object(module, NAME, partial(_scan, note)))
        yield


def _scan(
    note: Callable[[str], None],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Stand for the function of `transformers`, whose arguments these are."""
    note(NOTE)
    out: Any = _SelectiveScan.apply(hidden_states, dt, A, B, C, D, z, delta_bias)
    last = hidden_states.new_empty((*hidden_states.shape[:2], A.shape[1]))
    return (out, last) if return_last_state else out
