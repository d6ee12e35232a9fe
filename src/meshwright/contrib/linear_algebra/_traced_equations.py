"""Count the FLOPs of JAX's primitives of linear algebra, and of its Fourier transforms, by textbook formula.

Vectors that nothing needs are not counted, even where the library that is called computes them all the same:
executed FLOPs then say so.

Used by: `worker`, by the entry point.
"""

from __future__ import annotations

import math
from typing import Any

from ._textbook import ALL_VECTORS, NO_VECTORS, THIN_VECTORS, fft_flops, library_flops

FOURIER = "fft"
_ROUTINES = {
    "cholesky": "potrf", "lu": "getrf", "geqrf": "geqrf", "geqp3": "geqp3", "householder_product": "orgqr",
    "ormqr": "ormqr", "triangular_solve": "trsm", "tridiagonal_solve": "gtsv", "hessenberg": "gehrd",
    "tridiagonal": "sytrd", "eigh": "syevd", "eig": "geev", "schur": "gees", "svd": "gesvd", "qr": "geqrf",
}  # fmt: skip
TRACED = frozenset((*_ROUTINES, FOURIER))
"""Names of the primitives that are counted here; `worker` sends these."""


def traced_work(eqn: Any, jaxpr: Any) -> dict[str, int]:
    """Return the FLOPs of an equation of `TRACED`. `jaxpr`: the program that it stands in."""
    name = eqn.primitive.name
    if name == FOURIER:
        return {"work": _fourier(eqn)}
    operands = [tuple(variable.aval.shape) for variable in eqn.invars]
    is_complex = eqn.invars[0].aval.dtype.kind == "c"
    needed = _needed(eqn, jaxpr)
    vectors = _vectors(eqn, needed)
    flops = library_flops(_ROUTINES[name], operands, vectors=vectors, is_complex=is_complex)
    if name == "qr" and needed[0]:
        *batch, rows, columns = operands[0]
        reflections = min(rows, columns)
        formed = (*batch, rows, rows if eqn.params["full_matrices"] else reflections)
        flops += library_flops("orgqr", [formed, (*batch, reflections)], is_complex=is_complex)
    return {"work": flops}


def _fourier(eqn: Any) -> int:
    sides = [variable.aval for variable in (*eqn.invars, *eqn.outvars)]
    real = [aval for aval in sides if aval.dtype.kind != "c"]
    lengths = eqn.params["fft_lengths"]
    whole = (real or sides)[0]
    return fft_flops(lengths, whole.size // max(math.prod(lengths), 1), is_real=bool(real))


def _needed(eqn: Any, jaxpr: Any) -> list[bool]:
    """Return for each result of an equation whether its program reads or returns it."""
    read = {id(atom) for other in jaxpr.eqns for atom in other.invars} | {id(atom) for atom in jaxpr.outvars}
    return [id(variable) in read for variable in eqn.outvars]


def _vectors(eqn: Any, needed: list[bool]) -> str:
    """Return which vectors an equation is needed for; values come first, but for `eigh`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "svd":
        thin = not params["full_matrices"]
        return (THIN_VECTORS if thin else ALL_VECTORS) if any(needed[1:]) else NO_VECTORS
    with_vectors = {"eigh": needed[:1], "eig": needed[1:], "schur": needed[1:]}.get(name, [True])
    return ALL_VECTORS if any(with_vectors) else NO_VECTORS
