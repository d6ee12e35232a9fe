"""Read what XLA says of a program for which a device has too little memory: a verdict with figures.

XLA's compiler for TPUs refuses such a program before it writes any report on it. Two sentences of libtpu
0.0.42 are known. The one on "HLO temporaries" counts arguments and results too: for a step that returns its
two arrays of 7.45 GiB changed, it says 29.98G. A kernel that needs more of a chip's own memory than there is
remains an error, as does a compilation for which this machine has too little memory. XLA's compilers for GPUs
and CPUs know no limit, and refuse nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshwright.errors import CompileError
from meshwright.units import format_bytes

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(\d+(?:\.\d+)?)([KMGT]?)i?B?"
_WHOLE = re.compile(rf"[Rr]an out of memory in memory space hbm\. Used {_SIZE} of {_SIZE} hbm")
_EARLIER = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A program that XLA refused because a device has too little memory, and what is known of it.

    `needed_bytes` and `usable_bytes`: XLA's figures of one device, to the digits that it prints. `words`: the
    sentence of XLA. `argument_bytes_by_role`: what the step's arguments take on one device, by their shapes.
    """

    needed_bytes: int
    usable_bytes: int
    words: str
    compiler: str
    seconds: float = 0.0
    mesh_axes: tuple[tuple[str, int], ...] = ()
    num_parameters: int | None = None
    tokens_per_step: int | None = None
    argument_bytes_by_role: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def line(self) -> str:
        """XLA's figures in words."""
        needed, usable = format_bytes(self.needed_bytes), format_bytes(self.usable_bytes)
        beyond = self.needed_bytes - self.usable_bytes
        share = f"{100 * beyond / self.usable_bytes:.1f} %"
        return f"{needed} of {usable} per device, {format_bytes(beyond)} ({share}) too much"


class RefusedForMemory(CompileError):
    """XLA refused a program because a device has too little memory; `refusal` has its figures."""

    def __init__(self, name: str, fleet: str, refusal: Refusal) -> None:
        super().__init__(
            f"{name} does not fit on {fleet}: XLA refuses it. It needs {refusal.line}",
            hint="weigh it with a smaller batch, more rematerialisation, or on more devices",
        )
        self.refusal = refusal


def figures_of(words: str) -> tuple[int, int] | None:
    """Return the bytes needed and usable that XLA names; None for any other failure.

    >>> figures_of("Ran out of memory in memory space hbm. Used 20.50G of 15.48G hbm. Exceeded ...")
    (22011707392, 16621523435)
    """
    found = _WHOLE.search(words) or _EARLIER.search(words)
    if found is None:
        return None
    needed, usable = (int(float(found[place]) * UNITS[found[place + 1]]) for place in (1, 3))
    return needed, usable
