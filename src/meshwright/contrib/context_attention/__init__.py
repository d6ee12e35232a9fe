"""Compute attention over the mesh axis `context`: keys are gathered, or go round a ring.

Imports: `trainer.models`, jax. Used by: `trainer.models.attention`, by the entry point, on each device.
"""

from __future__ import annotations

from jaxtyping import Array

from meshwright.trainer.models.attention_blocks import Gradients, Kernel, PartResult

from ._ring import ring_backward, ring_forward
from .allgather_attention import gathered_backward, gathered_forward, windowed_backward, windowed_forward
from .allgather_attention import part_sizes as part_sizes


def forward(
    kernel: Kernel,
    size: int,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    window: int | None,
    is_gathered: bool,
) -> PartResult:
    """Return what one device's queries read, of the keys that it gathers or of those that pass it."""
    if window is not None:
        return windowed_forward(kernel, size, query, key, value, segments, window)
    if is_gathered:
        return gathered_forward(kernel, size, query, key, value)
    return ring_forward(kernel, size, query, key, value, segments)


def backward(
    kernel: Kernel,
    size: int,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    window: int | None,
    is_gathered: bool,
    result: PartResult,
    d_out: Array,
) -> Gradients:
    """Return the gradients of one device's queries, keys and values."""
    if window is not None:
        return windowed_backward(kernel, size, query, key, value, segments, window, result, d_out)
    if is_gathered:
        return gathered_backward(kernel, size, query, key, value, result, d_out)
    return ring_backward(kernel, size, query, key, value, segments, result, d_out)
