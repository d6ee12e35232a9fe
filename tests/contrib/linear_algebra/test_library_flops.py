"""FLOPs of decompositions, linear systems and transforms: against textbook algorithms that are run, against
XLA's cost analysis, and between a program as it is traced and as it is compiled."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshwright as mw
from meshwright.contrib.linear_algebra import (
    NO_VECTORS,
    ROUTINES,
    THIN_VECTORS,
    TRACED,
    fft_flops,
    library_flops,
)
from meshwright.hlo import parse_program
from meshwright.ledger import executed_flops, executions_of
from meshwright.worker import LIBRARY, count_traced

N, WIDE = 64, 512


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# Textbook algorithms, run on numbers that count their arithmetic.


class Number:
    """A real number that counts additions, subtractions, products, quotients and roots."""

    operations = 0

    def __init__(self, value):
        self.value = value

    def _with(self, other, result):
        Number.operations += 1
        return Number(result(self.value, other.value))

    def __add__(self, other):
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other):
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other):
        return self._with(other, lambda a, b: a * b)

    def __truediv__(self, other):
        return self._with(other, lambda a, b: a / b)

    def root(self):
        Number.operations += 1
        return Number(math.sqrt(self.value))


def numbers(values):
    return [[Number(float(value)) for value in row] for row in values]


def count(algorithm, *matrices):
    before = Number.operations
    result = algorithm(*map(numbers, matrices))
    return Number.operations - before, result


def values(matrix):
    return np.array([[number.value for number in row] for row in matrix])


def cholesky(a):
    n = len(a)
    for k in range(n):
        a[k][k] = a[k][k].root()
        for i in range(k + 1, n):
            a[i][k] = a[i][k] / a[k][k]
        for j in range(k + 1, n):
            for i in range(j, n):
                a[i][j] = a[i][j] - a[i][k] * a[j][k]
    return a


def lu(a):
    m, n = len(a), len(a[0])
    for k in range(min(m, n)):
        for i in range(k + 1, m):
            a[i][k] = a[i][k] / a[k][k]
            for j in range(k + 1, n):
                a[i][j] = a[i][j] - a[i][k] * a[k][j]
    return a


def solve_lower(a, b):
    for i in range(len(a)):
        for c in range(len(b[0])):
            for j in range(i):
                b[i][c] = b[i][c] - a[i][j] * b[j][c]
            b[i][c] = b[i][c] / a[i][i]
    return b


def reflect(v, a, first):
    """Apply I - 2 v v^T / v^T v to the columns of `a` from `first`, in the rows of `v`."""
    scale = total([x * x for x in v])
    top = len(a) - len(v)
    for j in range(first, len(a[0])):
        weight = total([x * a[top + i][j] for i, x in enumerate(v)])
        weight = (weight + weight) / scale
        for i, x in enumerate(v):
            a[top + i][j] = a[top + i][j] - x * weight


def total(terms):
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


def householder(a):
    """Reduce to a triangle, and return the reflections."""
    reflections = []
    for k in range(len(a[0])):
        v = [row[k] for row in a[k:]]
        v[0] = v[0] + total([x * x for x in v]).root()
        reflect(v, a, k)
        reflections.append(v)
    return reflections


def form_q(reflections, columns):
    m = len(reflections[0])
    q = numbers(np.eye(m, columns))
    before = Number.operations
    for k in reversed(range(len(reflections))):
        reflect(reflections[k], q, k)  # the columns before are those of the identity still
    return Number.operations - before, q


def solve_tridiagonal(diagonals, b):
    lower, middle, upper = diagonals
    n = len(middle)
    for i in range(1, n):
        factor = lower[i] / middle[i - 1]
        middle[i] = middle[i] - factor * upper[i - 1]
        for c in range(len(b[0])):
            b[i][c] = b[i][c] - factor * b[i - 1][c]
    for c in range(len(b[0])):
        b[n - 1][c] = b[n - 1][c] / middle[n - 1]
        for i in reversed(range(n - 1)):
            b[i][c] = (b[i][c] - upper[i] * b[i + 1][c]) / middle[i]
    return b


def radix_two(real, imaginary):
    """Transform by Cooley and Tukey: a butterfly is a complex product (6) and two complex sums (4)."""
    n = len(real)
    if n == 1:
        return real, imaginary
    (er, ei), (odd_r, odd_i) = (radix_two(real[p::2], imaginary[p::2]) for p in (0, 1))
    tops, bottoms = ([], []), ([], [])
    for k in range(n // 2):
        c, s = (Number(f(2 * math.pi * k / n)) for f in (math.cos, lambda x: -math.sin(x)))
        r, i = odd_r[k] * c - odd_i[k] * s, odd_r[k] * s + odd_i[k] * c
        for part, even, twisted in ((0, er[k], r), (1, ei[k], i)):
            tops[part].append(even + twisted)
            bottoms[part].append(even - twisted)
    return tops[0] + bottoms[0], tops[1] + bottoms[1]


def definite(n):
    a = np.random.default_rng(0).normal(size=(n, n))
    return a @ a.T + n * np.eye(n)


SIDE, TALL = 30, 50
LOWER_ORDER = 0.15  # of the count: what a formula of leading terms leaves out at this size


def near(counted, formula):
    assert counted == pytest.approx(formula, rel=LOWER_ORDER)


def test_cholesky_counts_as_the_textbook_algorithm():
    counted, result = count(cholesky, definite(SIDE))
    assert np.allclose(np.tril(values(result)), np.linalg.cholesky(definite(SIDE)))
    near(counted, library_flops("potrf", [(SIDE, SIDE)]))


@pytest.mark.parametrize("shape", [(SIDE, SIDE), (TALL, SIDE), (SIDE, TALL)])
def test_lu_counts_as_the_textbook_algorithm(shape):
    counted, _ = count(lu, np.eye(*shape) + 0.01)
    near(counted, library_flops("getrf", [shape]))


def test_a_triangular_system_counts_exactly_as_the_textbook_algorithm():
    right_sides = np.random.default_rng(1).normal(size=(SIDE, 7))
    counted, result = count(solve_lower, definite(SIDE), right_sides)
    assert np.allclose(values(result), np.linalg.solve(np.tril(definite(SIDE)), right_sides))
    assert counted == library_flops("trsm", [(SIDE, SIDE), (SIDE, 7)])


def test_qr_and_its_q_count_as_householders_algorithm():
    a = np.random.default_rng(2).normal(size=(TALL, SIDE))
    counted, reflections = count(householder, a)
    near(counted, library_flops("geqrf", [(TALL, SIDE)]))
    for columns in (SIDE, TALL):
        formed, q = form_q(reflections, columns)
        assert np.allclose(np.abs(values(q))[:, :SIDE], np.abs(np.linalg.qr(a)[0]))
        near(formed, library_flops("orgqr", [(TALL, columns), (SIDE,)]))
    others = numbers(np.ones((TALL, 5)))
    before = Number.operations
    for v in reflections:
        reflect(v, others, 0)
    norms = sum(2 * len(v) - 1 for v in reflections)  # LAPACK keeps 2 / v^T v; here each is computed again
    near(Number.operations - before - norms, library_flops("ormqr", [(TALL, SIDE), (SIDE,), (TALL, 5)]))


def test_a_tridiagonal_system_counts_as_eliminating_and_substituting():
    diagonals = [np.ones(SIDE), np.full(SIDE, 4.0), np.ones(SIDE)]
    counted, _ = count(solve_tridiagonal, diagonals, np.ones((SIDE, 3)))
    near(counted, library_flops("gtsv", [(SIDE,), (SIDE,), (SIDE,), (SIDE, 3)]))


def test_a_transform_counts_exactly_as_radix_two():
    x = np.random.default_rng(3).normal(size=(2, 256))
    before = Number.operations
    real, imaginary = radix_two(*numbers(x))
    counted = Number.operations - before
    assert np.allclose(values([real])[0] + 1j * values([imaginary])[0], np.fft.fft(x[0] + 1j * x[1]))
    assert counted == fft_flops([256], 1, is_real=False) == 2 * fft_flops([256], 1, is_real=True)
    assert fft_flops([16, 16], 3, is_real=False) == 3 * counted  # log2 of all points, in one dimension or two


def test_iterative_routines_count_by_the_books_table():
    """Golub & Van Loan, 4th edition: 8.3 (symmetric), 7.5.6 (Schur form), figure 8.6.1 (singular values)."""
    square, tall = [(30, 30)], [(50, 30)]
    assert library_flops("syevd", square) == 9 * 27_000
    assert library_flops("syevd", square, vectors=NO_VECTORS) == 36_000
    assert library_flops("geev", square) == 25 * 27_000
    assert library_flops("gees", square, vectors=NO_VECTORS) == 270_000
    assert library_flops("gesvd", tall) == 4 * 75_000 + 8 * 45_000 + 9 * 27_000
    assert library_flops("gesvd", tall, vectors=THIN_VECTORS) == 14 * 45_000 + 8 * 27_000
    assert library_flops("gesvd", [(30, 50)], vectors=NO_VECTORS) == 4 * 45_000 - 36_000
    assert library_flops("gehrd", square) == 90_000
    assert library_flops("sytrd", square) == 36_000


def test_a_batch_multiplies_and_complex_numbers_count_four_times():
    for name in ROUTINES.keys() - {"ormqr", "gtsv"}:
        one = library_flops(name, [(30, 30), (30, 30) if name == "trsm" else (30,)])
        right = (2, 3, 30, 30) if name == "trsm" else (2, 3, 30)
        assert library_flops(name, [(2, 3, 30, 30), right], is_complex=True) == 24 * one


def test_xlas_cost_analysis_says_the_same_of_cholesky():
    """For a TPU JAX leaves it to XLA, whose analysis counts it, and a triangle's comparison and selection."""

    def factor(a):
        return lax.linalg.cholesky(a, symmetrize_input=False)

    lowered = jax.jit(factor).trace(array(8, N, N)).lower(lowering_platforms=("tpu",))
    said = lowered.cost_analysis()
    assert said is not None
    assert int(said["flops"]) == model(factor, array(8, N, N)) + 9 * N * N


# Traced and compiled.


def model(function, *arguments):
    counted = count_traced(jax.jit(function).trace(*arguments).jaxpr.jaxpr, "cpu")
    assert counted.unpriced == ()
    return sum(counted.by_phase.values())


def executed(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return executed_flops(executions_of(parse_program(text)))


PROGRAMS = {
    "cholesky": (jnp.linalg.cholesky, array(8, N, N)),
    "LU": (jax.scipy.linalg.lu_factor, array(N, N)),
    "solution": (jnp.linalg.solve, array(N, N), array(N, 4)),
    "inverse": (jnp.linalg.inv, array(2, N, N)),
    "right triangle": (lax.linalg.triangular_solve, array(N, N), array(8, N)),
    "QR": (jnp.linalg.qr, array(128, N)),
    "QR of a batch of wide ones": (jnp.linalg.qr, array(3, N, 128)),
    "whole Q": (lambda a: jnp.linalg.qr(a, mode="complete"), array(128, N)),
    "R": (lambda a: jnp.linalg.qr(a, mode="r"), array(128, N)),
    "pivoted QR": (lambda a: jax.scipy.linalg.qr(a, pivoting=True), array(128, N)),
    "Q applied": (lax.linalg.ormqr, array(128, N), array(N), array(128, 8)),
    "symmetric": (jnp.linalg.eigh, array(N, N)),
    "hermitian": (jnp.linalg.eigh, array(N, N, dtype=jnp.complex64)),
    "eigenvectors": (jnp.linalg.eig, array(N, N)),
    "eigenvalues": (jnp.linalg.eigvals, array(N, N)),
    "Schur": (jax.scipy.linalg.schur, array(N, N)),
    "singular vectors": (jnp.linalg.svd, array(128, N)),
    "thin singular vectors": (lambda a: jnp.linalg.svd(a, full_matrices=False), array(5, 128, N)),
    "singular values": (lambda a: jnp.linalg.svd(a, compute_uv=False), array(N, 128)),
    "Hessenberg": (jax.scipy.linalg.hessenberg, array(N, N)),
    "tridiagonal": (lax.linalg.tridiagonal_solve, array(N), array(N), array(N), array(N, 2)),
    "Fourier": (jnp.fft.fft2, array(8, N, N, dtype=jnp.complex64)),
    "real Fourier": (jnp.fft.rfftn, array(8, N, N)),
    "inverse real Fourier": (jnp.fft.irfft, array(8, 513, dtype=jnp.complex64)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_executes_what_it_is_traced_to_need(name):
    ran = executed(*PROGRAMS[name])
    assert ran.total == model(*PROGRAMS[name]) > 0
    assert not any("lapack" in text or "fft" in text for text in ran.unpriced)


def test_vectors_that_nobody_needs_are_executed_and_not_the_models():
    """LAPACK's call computes them, because JAX asks for them always."""
    assert model(jnp.linalg.eigvalsh, array(N, N)) == math.floor(Fraction(4 * N**3, 3))
    assert executed(jnp.linalg.eigvalsh, array(N, N)).total == 9 * N**3


def test_a_solution_counts_its_decomposition_and_both_triangles():
    assert model(jnp.linalg.solve, array(N, N), array(N, 4)) == 2 * N**3 // 3 + 2 * N**2 * 4


def test_a_gradient_counts_its_own_solutions():
    def loss(a, b):
        return jnp.sum(jnp.linalg.solve(a, b))

    counted = count_traced(jax.jit(jax.grad(loss, 1)).trace(array(N, N), array(N, 4)).jaxpr.jaxpr, "cpu")
    assert sum(counted.by_phase.values()) == 2 * N**3 // 3 + 2 * N**2 * 4  # LU, and the transposed system


def test_a_sort_has_no_flops_and_is_unpriced():
    ran = executed(jnp.sort, array(N))
    assert ran.total == model(jnp.sort, array(N)) == 0
    assert any(text.startswith("sort(") for text in ran.unpriced)


# Weighed for a GPU.

ON_GPUS = {
    "cholesky": (jnp.linalg.cholesky, array(8, N, N)),
    "solution": (jnp.linalg.solve, array(N, N), array(N, 4)),
    "thin singular vectors": (lambda a: jnp.linalg.svd(a, full_matrices=False), array(2000, N)),
    "Fourier": (jnp.fft.rfft, array(8, 1024)),
    "eigenvectors": (jnp.linalg.eig, array(N, N)),
}


@pytest.mark.parametrize("name", ON_GPUS)
def test_on_a_gpu_they_have_flops_and_their_time_has_no_upper_end(name, forked_workers):
    function, *arguments = ON_GPUS[name]
    weighing = mw.weigh(mw.jax_step(function, *arguments), on="1xH100")
    flops, prediction = weighing.ledger.flops, weighing.prediction
    assert prediction is not None
    assert flops.executed == flops.model == model(function, *arguments)
    assert weighing.ledger.unpriced == ()
    assert all("no rate of it is known, its least time is taken" in each for each in prediction.unpriced)
    assert prediction.unpriced
    assert prediction.step_seconds.high is None
    assert 0 < prediction.mfu <= 1
    assert "unpriced  time of " in str(weighing)


def test_work_of_which_no_peak_is_known_leaves_the_utilisation_unknown(forked_workers):
    """An integer product has no peak on this chip: without its time the FLOPs would exceed the peak."""
    integers, small = array(4096, 4096, dtype=jnp.int32), array(256, 256, dtype=jnp.bfloat16)
    weighing = mw.weigh(mw.jax_step(lambda a, b: (a @ a, b @ b), integers, small), on="1xH100")
    assert weighing.ledger.flops.model == 2 * 4096**3 + 2 * 256**3
    assert weighing.prediction is not None
    assert weighing.prediction.mfu is None
    assert weighing.prediction.unpriced == ("matmul in s32: H100 has no known peak for it",)


def test_the_worker_sends_the_primitives_that_are_counted():
    assert LIBRARY == TRACED
