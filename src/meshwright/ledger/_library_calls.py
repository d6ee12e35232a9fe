"""Count one call of a library of linear algebra, or one Fourier transform, in a compiled program.

XLA's CPU backend calls LAPACK, its GPU backend cuSOLVER, cuBLAS and cuSPARSE. Each call counts by the
textbook formula of its routine (`hlo/_textbook.py`), with the vectors that the call computes.
"""

from __future__ import annotations

import functools
import math
import re

from meshwright import hlo  # its formulas are imported where a program has such a call
from meshwright.hlo import Computation, Instruction

LINEAR_ALGEBRA, FOURIER = "linear algebra", "fft"
"""Kinds of work of which no rate is known."""

_TARGET = re.compile(r"(?:lapack_[sdcz]|cusolver_|cusparse_)(\w+)_ffi$")
_OWN_NAMES = {
    "cholesky": "potrf", "__cusolver$cholesky": "potrf",
    "triangular-solve": "trsm", "__cublas$triangularSolve": "trsm",
}  # fmt: skip
_SYNONYMS = {  # for complex numbers, and for other algorithms
    "ungqr": "orgqr", "unmqr": "ormqr", "heevd": "syevd", "hetrd": "sytrd", "gtsv2": "gtsv",
    "gesdd": "gesvd", "gesvdj": "gesvd", "gesvdp": "gesvd",
}  # fmt: skip
_NONE, _THIN = ("false", str(ord("N"))), ("false", str(ord("S")))  # as cuSOLVER's calls say it, and LAPACK's


def is_library_work(instruction: Instruction) -> bool:
    """Return whether an instruction is a routine with a textbook formula, or a Fourier transform."""
    return instruction.opcode == FOURIER or _routine(instruction) is not None


def library_work(computation: Computation, instruction: Instruction) -> tuple[str, int, str]:
    """Return the kind of work, its FLOPs, and the type of its real numbers, as XLA names it."""
    operands = computation.operand_arrays(instruction)
    complex_type = operands[0].dtype.startswith("c")
    dtype = {"c64": "f32", "c128": "f64"}.get(operands[0].dtype, operands[0].dtype)
    if instruction.opcode == FOURIER:
        lengths = [int(length) for length in re.findall(r"\d+", instruction.attributes["fft_length"])]
        sides = (operands[0], instruction.arrays[0])
        real = [array for array in sides if not array.dtype.startswith("c")]
        count = (real or sides)[0].num_elements // max(math.prod(lengths), 1)
        return FOURIER, hlo.fft_flops(lengths, count, is_real=bool(real)), dtype
    routine = _routine(instruction)
    assert routine is not None, instruction.name
    dims = [tuple(array.dims) for array in operands]
    flops = hlo.library_flops(routine, dims, vectors=_vectors(instruction), is_complex=complex_type)
    return LINEAR_ALGEBRA, flops, dtype


def _routine(instruction: Instruction) -> str | None:
    """Return the LAPACK routine that an instruction computes, if `ROUTINES` has it."""
    is_call = instruction.opcode == "custom-call"
    return _routine_of(instruction.custom_call_target if is_call else instruction.opcode)


@functools.lru_cache(maxsize=1000)
def _routine_of(name: str) -> str | None:
    if own := _OWN_NAMES.get(name):
        return own
    found = _TARGET.match(name)
    routine = _SYNONYMS.get(found[1], found[1]) if found else ""
    return routine if routine and routine in hlo.ROUTINES else None


def _vectors(instruction: Instruction) -> str:
    """Return which vectors a call computes in addition to values."""
    said = dict(re.findall(r"(\w+) = (\w+)", instruction.attributes.get("backend_config", "")))
    asked = ("compute_uv", "mode", "left", "right", "compute_left", "compute_right")
    flags = [said[name] for name in asked if name in said]
    if flags and all(flag in _NONE for flag in flags):
        return hlo.NO_VECTORS
    thin = said.get("full_matrices", said.get("mode")) in _THIN
    return hlo.THIN_VECTORS if thin else hlo.ALL_VECTORS
