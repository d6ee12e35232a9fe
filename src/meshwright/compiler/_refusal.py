"""Read what XLA says of a program for which a device has too little memory: a verdict with figures.

XLA's compiler for TPUs refuses such a program before it writes any report on it. Two sentences of libtpu
0.0.42 are known. The one on "HLO temporaries" counts arguments and results too: for a step that returns its
two arrays of 7.45 GiB changed, it says 29.98G. A kernel that needs more of a chip's own memory than there is
remains an error, as does a compilation for which this machine has too little memory. XLA's compilers for GPUs
and CPUs know no limit, and refuse nothing.
"""

from __future__ import annotations

import re

from meshwright.errors import CompileError

from ._record import Refusal

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(\d+(?:\.\d+)?)([KMGT]?)i?B?"
_WHOLE = re.compile(rf"[Rr]an out of memory in memory space hbm\. Used {_SIZE} of {_SIZE} hbm")
_EARLIER = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")


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
