"""Return the FLOPs of dense linear algebra and of Fourier transforms by textbook formula.

A traced program has primitives for them, a compiled one calls a library (LAPACK, cuSOLVER, cuBLAS, cuFFT).
Both are counted here, under LAPACK's name of the routine without its letter for the type, so that the two
counts of one operation agree. The formulas are leading terms; an iterative routine (eigenvalues, singular
values) counts by the formula of the QR algorithm, whichever algorithm the library chooses.

Sources. For an m x n matrix, m >= n: Golub & Van Loan, Matrix Computations, 4th edition: triangular systems
3.1, LU 3.2, Cholesky 4.2.5, tridiagonal systems 4.3.6, Householder QR and its Q 5.2.2, Hessenberg form
7.4.3, Schur form 7.5.6, tridiagonal form and symmetric eigenvalues 8.3, singular values 8.6 (figure 8.6.1,
the columns of Golub and Kahan). Partial Q and its application: LAPACK Working Note 41, appendix C (ORGQR,
ORMQR). Fourier transforms: Van Loan, Computational Frameworks for the Fast Fourier Transform, 1992, chapter
1: 5 N log2 N; half of it for real numbers, as FFTW reports its rates.
Complex numbers: four times as much, as for a product. Sorts compare: they have no FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

Dims = tuple[int, ...]
NO_VECTORS, THIN_VECTORS, ALL_VECTORS = "no vectors", "thin vectors", "all vectors"


def library_flops(
    routine: str, operands: Sequence[Dims], *, vectors: str = ALL_VECTORS, is_complex: bool = False
) -> int:
    """Return the FLOPs of one call of a routine of `ROUTINES`, rounded down to whole ones.

    Args:
        routine: LAPACK's name without the letter for the type, such as "potrf".
        operands: the dimensions of its arrays; leading ones are a batch.
        vectors: of eigenvalues and singular values, whether their vectors are computed, too. `THIN_VECTORS`:
            as many as there are singular values.
        is_complex: whether the numbers are complex.

    >>> library_flops("potrf", [(8, 64, 64)])
    699050
    """
    first = operands[0]
    of_matrix = first[-1:] if routine == "gtsv" else first[-2:]
    batch = math.prod(first[: len(first) - len(of_matrix)])
    each = ROUTINES[routine](operands, vectors)
    return int(batch * each * (4 if is_complex else 1))


def fft_flops(lengths: Sequence[int], num_transforms: int, *, is_real: bool) -> int:
    """Return the FLOPs of Fourier transforms, rounded down to whole ones.

    Args:
        lengths: of one transform, in each of its dimensions; for real numbers, of the real side.
        num_transforms: how many are computed.
        is_real: whether one side of the transform is real.

    >>> fft_flops([1024], 1, is_real=False)
    51200
    """
    numbers = math.prod(lengths)
    return int((2.5 if is_real else 5) * num_transforms * numbers * math.log2(max(numbers, 1)))


def _sides(dims: Dims) -> tuple[int, int]:
    """Return the longer and the shorter side of a matrix."""
    return max(dims[-2:]), min(dims[-2:])


def _cholesky(operands: Sequence[Dims], vectors: str) -> Fraction:
    return Fraction(operands[0][-1] ** 3, 3)


def _lu(operands: Sequence[Dims], vectors: str) -> Fraction:
    m, n = _sides(operands[0])
    return m * n**2 - Fraction(n**3, 3)


def _qr(operands: Sequence[Dims], vectors: str) -> Fraction:
    return 2 * _lu(operands, vectors)


def _form_q(operands: Sequence[Dims], vectors: str) -> Fraction:
    """Form the first n columns of a product of k reflections of order m. Operands: [m, n], [k]."""
    (*_, m, n), (*_, k) = operands[:2]
    return 4 * m * n * k - 2 * (m + n) * k**2 + Fraction(4 * k**3, 3)


def _apply_q(operands: Sequence[Dims], vectors: str) -> Fraction:
    """Apply a product of k reflections of order m to a matrix, from either side: [m, k], [k], the matrix."""
    (*_, order, _), (*_, k), (*_, rows, columns) = operands[:3]
    others = columns if rows == order else rows
    return Fraction(4 * order * others * k - 2 * others * k**2)


def _solve_triangular(operands: Sequence[Dims], vectors: str) -> Fraction:
    """Solve with a matrix of order n from either side. Operands: [n, n], the right sides."""
    order, sides = operands[0][-1], operands[1]
    return Fraction(order * math.prod(sides[-2:]))


def _solve_tridiagonal(operands: Sequence[Dims], vectors: str) -> Fraction:
    """Eliminate (3 n), then solve (5 n for each right side). Operands: three diagonals [n], right sides."""
    *_, n, columns = operands[3]
    return Fraction(3 * n + 5 * n * columns)


def _symmetric_eigenvalues(operands: Sequence[Dims], vectors: str) -> Fraction:
    cube = operands[0][-1] ** 3
    return Fraction(4 * cube, 3) if vectors == NO_VECTORS else Fraction(9 * cube)


def _eigenvalues(operands: Sequence[Dims], vectors: str) -> Fraction:
    return Fraction((10 if vectors == NO_VECTORS else 25) * operands[0][-1] ** 3)


def _singular_values(operands: Sequence[Dims], vectors: str) -> Fraction:
    m, n = _sides(operands[0])
    if vectors == NO_VECTORS:
        return 4 * m * n**2 - Fraction(4 * n**3, 3)
    if vectors == THIN_VECTORS:
        return Fraction(14 * m * n**2 + 8 * n**3)
    return Fraction(4 * m**2 * n + 8 * m * n**2 + 9 * n**3)


def _hessenberg(operands: Sequence[Dims], vectors: str) -> Fraction:
    return Fraction(10 * operands[0][-1] ** 3, 3)


def _tridiagonal(operands: Sequence[Dims], vectors: str) -> Fraction:
    return Fraction(4 * operands[0][-1] ** 3, 3)


ROUTINES: dict[str, Callable[[Sequence[Dims], str], Fraction]] = {
    "potrf": _cholesky,
    "getrf": _lu,
    "geqrf": _qr,
    "geqp3": _qr,
    "orgqr": _form_q,
    "ormqr": _apply_q,
    "trsm": _solve_triangular,
    "gtsv": _solve_tridiagonal,
    "syevd": _symmetric_eigenvalues,
    "geev": _eigenvalues,
    "gees": _eigenvalues,
    "gesvd": _singular_values,
    "gehrd": _hessenberg,
    "sytrd": _tridiagonal,
}
"""By routine, the FLOPs of one matrix from the dimensions of all operands and the vectors asked for."""
