"""Count one call of a library of linear algebra, or one Fourier transform, in a compiled program.

Each call counts with the vectors that it computes.

Used by: `ledger`, by the entry point.
"""

from __future__ import annotations

import math
import re

from meshwright.hlo import Computation, Instruction

from ._textbook import ALL_VECTORS, NO_VECTORS, THIN_VECTORS, fft_flops, library_flops

_NONE, _THIN = ("false", str(ord("N"))), ("false", str(ord("S")))  # as cuSOLVER's calls say it, and LAPACK's


def compiled_work(computation: Computation, instruction: Instruction, routine: str | None) -> tuple[int, str]:
    """Return the FLOPs of an instruction, and the type of its real numbers, as XLA names it.

    Args:
        routine: of `ROUTINES`; None for a Fourier transform.
    """
    operands = computation.operand_arrays(instruction)
    complex_type = operands[0].dtype.startswith("c")
    dtype = {"c64": "f32", "c128": "f64"}.get(operands[0].dtype, operands[0].dtype)
    if routine is None:
        lengths = [int(length) for length in re.findall(r"\d+", instruction.attributes["fft_length"])]
        sides = (operands[0], instruction.arrays[0])
        real = [array for array in sides if not array.dtype.startswith("c")]
        count = (real or sides)[0].num_elements // max(math.prod(lengths), 1)
        return fft_flops(lengths, count, is_real=bool(real)), dtype
    dims = [tuple(array.dims) for array in operands]
    return library_flops(routine, dims, vectors=_vectors(instruction), is_complex=complex_type), dtype


def _vectors(instruction: Instruction) -> str:
    """Return which vectors a call computes in addition to values."""
    said = dict(re.findall(r"(\w+) = (\w+)", instruction.attributes.get("backend_config", "")))
    asked = ("compute_uv", "mode", "left", "right", "compute_left", "compute_right")
    flags = [said[name] for name in asked if name in said]
    if flags and all(flag in _NONE for flag in flags):
        return NO_VECTORS
    thin = said.get("full_matrices", said.get("mode")) in _THIN
    return THIN_VECTORS if thin else ALL_VECTORS
