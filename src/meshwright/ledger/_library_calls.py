"""Recognise a call of a library of linear algebra, or a Fourier transform, in a compiled program.

XLA's CPU backend calls LAPACK, its GPU backend cuSOLVER, cuBLAS and cuSPARSE. A room outside the core has the
textbook formulas of their routines, and is loaded where a program has such a call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container
from typing import Protocol

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


class _Formulas(Protocol):
    """Counts calls by textbook formula: a room outside, which an entry point names."""

    @property
    def ROUTINES(self) -> Container[str]:
        """Names of LAPACK's routines that it can count."""
        ...

    def compiled_work(
        self, computation: Computation, instruction: Instruction, routine: str | None
    ) -> tuple[int, str]:
        """Return the FLOPs of a call, and the type of its real numbers; `routine`: None for a transform."""
        ...


def _formulas() -> _Formulas:
    from meshwright.registry import room

    return room("linear_algebra")


def is_library_work(instruction: Instruction) -> bool:
    """Return whether an instruction is a routine with a textbook formula, or a Fourier transform."""
    return instruction.opcode == FOURIER or _routine(instruction) is not None


def library_work(computation: Computation, instruction: Instruction) -> tuple[str, int, str]:
    """Return the kind of work, its FLOPs, and the type of its real numbers, as XLA names it."""
    routine = None if instruction.opcode == FOURIER else _routine(instruction)
    kind = FOURIER if routine is None else LINEAR_ALGEBRA
    return kind, *_formulas().compiled_work(computation, instruction, routine)


def _routine(instruction: Instruction) -> str | None:
    """Return the LAPACK routine that an instruction computes, if there is a formula for it."""
    is_call = instruction.opcode == "custom-call"
    return _routine_of(instruction.custom_call_target if is_call else instruction.opcode)


@functools.lru_cache(maxsize=1000)
def _routine_of(name: str) -> str | None:
    if own := _OWN_NAMES.get(name):
        return own
    found = _TARGET.match(name)
    routine = _SYNONYMS.get(found[1], found[1]) if found else ""
    return routine if routine and routine in _formulas().ROUTINES else None
