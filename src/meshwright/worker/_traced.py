"""Count the FLOPs of a traced JAX program, equation by equation, before any compiler.

Imports jax: only the worker process may import this module. Shapes are global. Dead code, which no output and
no effect needs, is removed first, as XLA does.

Primitives are in four groups. `RULES` has a function for the FLOPs of each of its primitives. Those in
`LIBRARY` (decompositions, linear systems, Fourier transforms) count by textbook formula. Those in `WALKED`
run a program from their parameters. Those in `FREE` multiply no matrices. `_Counter` itself enters `scan`,
`while`, `cond`, `shard_map` and `custom_linear_solve`, of which it takes the solution.

Counted: a multiply-add is two FLOPs, eight for complex numbers (four products, four sums), four for a complex
and a real number. A convolution counts every tap of its window at every output, including taps on padding,
but not taps on the holes that dilation opens in its input. `scan` counts by its length, `while` by its rounds
where a counter decides them and else once, `cond` by its most expensive branch, `platform_dependent` by the
target's branch. Inside a scope `needed_A_of_B` (or `busy_...`, see `hlo/_annotations.py`) the
arithmetic counts A/B: causal attention written in blocks uses such a scope.
Not counted: elementwise arithmetic, reductions, sorts.
Pallas kernels and foreign functions count as `_traced_kernels.py` says. Listed as unpriced, with shapes:
every primitive in none of the groups, among them primitives of the user or of a later release of JAX. A
`while` that counts once is listed too.

Sources: the primitives' definitions in `jax.lax`; attention: Dao et al. 2022, arXiv 2205.14135;
`symmetric_product`: LAPACK Working Note 41, appendix C (SYRK: n (n + 1) k).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jax._src import source_info_util  # no public name reads an equation's frames
from jax.extend import core
from jax.interpreters import partial_eval

from meshwright.compiler import FOREIGN, MAPPED, PALLAS, NamedKernel, TracedFlops
from meshwright.hlo import expected_trips, module_of, phase_of, place_of_frames, shares_of, twice_seen
from meshwright.registry import room

from ._grid import Undecided, scan_sizes

LINEAR_SOLVE = "custom_linear_solve"
LIBRARY = frozenset((
    "cholesky", "eig", "eigh", "fft", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "ormqr",
    "qr", "schur", "svd", "triangular_solve", "tridiagonal", "tridiagonal_solve",
))  # fmt: skip
# The parameters in which a primitive may hold the program that it runs once.
_PROGRAMS = ("jaxpr", "call_jaxpr", "call", "callee", "fwd_jaxpr")
WALKED = frozenset((
    "jit", "pjit", "closed_call", "core_call", "call", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vmap_call", "custom_partitioning", "linear_call", "composite", "compute_on",
    "cudnn_fusion", "eval_jaxpr", "fused_call", "remat_opt", "run_state", "xla_metadata_call",
))  # fmt: skip

_ELEMENTWISE = """
_copysign abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos cosh digamma div eq
eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le
le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or
polygamma polynomial population_count pow real reciprocal reduce_precision regularized_incomplete_beta rem
round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
stochastic_round stop_gradient sub tan tanh xor zeta
"""
_REDUCTIONS_AND_SORTS = """
approx_top_k argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and reduce_max reduce_min
reduce_or reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min reduce_window_sum
reduce_xor select_and_gather_add select_and_scatter select_and_scatter_add sort top_k
"""
_MOVEMENT_AND_CREATION = """
accum_grad_in_ref addupdate axis_index box_get box_set broadcast_in_dim broadcast_to concatenate
create_linear create_token after_all device_put dim_as_value dimension_size dynamic_slice
dynamic_update_slice empty empty2 empty_ref free_ref freeze from_edtype gather get iota iota_2x32_shape
layout_cast layout_constraint log_extend log_read lu_pivots_to_permutation name new_box new_log new_ref
optimization_barrier pad pin platform_index ragged_all_to_all relayout remove_memory_space reshape reshard
rev scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub shape_assertion shard_alike
sharding_constraint slice split squeeze stack stage swap tie tile to_edtype transpose unpin unreachable
unstack with_memory_space_constraint xla_metadata_value zeros_like bcoo_extract bcoo_fromdense
bcoo_sort_indices bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_extract bcsr_fromdense bcsr_todense
coo_fromdense coo_todense csr_fromdense csr_todense todense
"""
_COLLECTIVES = """
all_gather all_gather_invariant all_gather_reduced all_to_all global_array_to_host_local_array
host_local_array_to_global_array pbroadcast pbroadcast_dynamic pmax pmin ppermute precv preduced psend psum
psum_invariant pvary reduce_scatter reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin
unreduced_psum unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p all_gather_start
all_gather_done all_gather_reduced_start all_to_all_start all_to_all_done pbroadcast_start pbroadcast_done
ppermute_start ppermute_done psum_start psum_done psum_invariant_start reduce_scatter_start
reduce_scatter_done unreduced_psum_start unreduced_reduce_scatter_start
"""
_RANDOM_AND_DEBUGGING = """
philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed random_split
random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32 threefry4x32 assert_consumed_value
check consume dce_sink debug_callback debug_print inspect_sharding io_callback print_layout pure_callback
SearchSorted
"""
FREE = frozenset(
    f"{_ELEMENTWISE} {_REDUCTIONS_AND_SORTS} {_MOVEMENT_AND_CREATION} {_COLLECTIVES} "
    f"{_RANDOM_AND_DEBUGGING}".split()
)

Rule = Callable[[Any], dict[str, int]]
"""From an equation to its FLOPs: `work` of the phase it stands in, `recompute` where it repeats some."""


def inner_program(eqn: Any) -> Any:
    """Return the jaxpr that an equation of `WALKED` runs, or None where its parameters hold none."""
    for key in _PROGRAMS:
        value = eqn.params.get(key)
        if value is not None and hasattr(value, "eqns"):
            return getattr(value, "jaxpr", value)
    return None


def _multiply_add(*factors: Any) -> int:
    """Return the real FLOPs of one multiply-add of the operands' numbers: 2, 4 or 8."""
    return math.prod((2, *(2 for factor in factors if factor.aval.dtype.kind == "c")))


def _sizes(shape: tuple[int, ...], dims: Any) -> int:
    return math.prod(shape[d] for d in dims)


def _sizes_beside(shape: tuple[int, ...], *dims: Any) -> int:
    """Return the product of the dimensions that are in none of `dims`."""
    spent = {d for each in dims for d in each}
    return math.prod(size for d, size in enumerate(shape) if d not in spent)


def _dot(eqn: Any) -> dict[str, int]:
    """Count one multiply-add for each number of the result and each of the contracted dimensions."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, right = eqn.invars[:2]
    products = math.prod(eqn.outvars[0].aval.shape) * _sizes(left.aval.shape, contracted)
    return {"work": _multiply_add(left, right) * products}


def _ragged_dot(eqn: Any) -> dict[str, int]:
    """Count each row with the matrix of its own group only: the groups do not multiply the work."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right = eqn.invars[:2]
    columns = _sizes_beside(right.aval.shape, contracted, batch, numbers.rhs_group_dimensions)
    return {"work": _multiply_add(left, right) * math.prod(left.aval.shape) * columns}


def _scaled_matmul(eqn: Any) -> dict[str, int]:
    """Count [batch, m, k] x [batch, n, k], both scaled block by block."""
    left, right = eqn.invars[:2]
    return {"work": _multiply_add(left, right) * math.prod(left.aval.shape) * right.aval.shape[1]}


def _symmetric_product(eqn: Any) -> dict[str, int]:
    """Count one triangle of A A^T, with its diagonal, for A of [..., n, k]: the other triangle is equal."""
    *batch, n, k = eqn.invars[0].aval.shape
    factor = _multiply_add(eqn.invars[0], eqn.invars[0])
    return {"work": factor * math.prod(batch) * (n * (n + 1) // 2) * k}


def _bcoo_dot(eqn: Any) -> dict[str, int]:
    """Count each stored element, including padding, times the free dimensions of the dense side."""
    data, indices, dense = eqn.invars
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    num_batch = len(indices.aval.shape) - 2
    stored = math.prod((*eqn.params["lhs_spinfo"].shape[:num_batch], *data.aval.shape[num_batch:]))
    return {"work": _multiply_add(data, dense) * stored * _sizes_beside(dense.aval.shape, contracted, batch)}


def convolution(eqn: Any, *, gradient: bool, flipped: bool) -> dict[str, int]:
    """Count a convolution's FLOPs. One in the backward pass counts the same pairs as its forward convolution.

    Along each dimension a convolution has the sizes of input, window and output. Forward, window x output
    counts; for a transposed convolution (which dilates its input), window x input. JAX writes both gradients
    as convolutions with these roles exchanged.

    Args:
        gradient: the convolution is in the backward pass.
        flipped: its kernel is reversed, which marks the gradient of an input.
    """
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    image, kernel, out = (v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars))
    inputs = _sizes(image, numbers.lhs_spec[2:])
    window = _sizes(kernel, numbers.rhs_spec[2:])
    outputs = _sizes(out, numbers.out_spec[2:])
    if gradient and flipped:
        pairs = window * (outputs if any(stride > 1 for stride in params["window_strides"]) else inputs)
    elif any(holes > 1 for holes in params["lhs_dilation"]):
        pairs = inputs * (outputs if gradient else window)
    else:
        pairs = window * outputs
    # The kernel's input features are those of one group only. A batch group sums over its share of the batch.
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    batch_share = image[numbers.lhs_spec[0]] // params["batch_group_count"]
    assert batch == batch_share, f"output batch {batch}, expected {batch_share}"
    factor = _multiply_add(*eqn.invars[:2])
    return {"work": factor * pairs * batch * features * kernel[numbers.rhs_spec[1]]}


def _attention_products(eqn: Any) -> tuple[int, int]:
    """Return the FLOPs of cuDNN attention's products: queries by keys, and scores by values.

    The query is [batch, q, heads, head_dim].
    """
    query, key, value = (v.aval.shape for v in eqn.invars[:3])
    heads_first = eqn.params["layout"] == 1  # BNTH
    q_length, heads = (query[2], query[1]) if heads_first else (query[1], query[2])
    k_length = key[2] if heads_first else key[1]
    if window := eqn.params.get("sliding_window_length"):
        twice = twice_seen(q_length, window)
    else:
        twice = q_length * k_length * (1 if "CAUSAL" in str(eqn.params["mask_type"]) else 2)
    return query[0] * heads * twice * query[3], query[0] * heads * twice * value[3]


def _attention_gradients(eqn: Any) -> dict[str, Any]:
    """Count two products of each kind, and one to recompute the scores, which the flash kernel drops."""
    scores, values = _attention_products(eqn)
    return {"work": 2 * scores + 2 * values, "recompute": scores}


RULES: dict[str, Rule] = {
    "dot_general": _dot,
    "scaled_dot": _dot,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
    "symmetric_product": _symmetric_product,
    "bcoo_dot_general": _bcoo_dot,
    "bcoo_dot_general_sampled": _dot,  # at the stored places only
    "dot_product_attention_fwd_wrapper": lambda eqn: {"work": sum(_attention_products(eqn))},
    "dot_product_attention_bwd_wrapper": _attention_gradients,
    "dot_product_attention_fwd": lambda eqn: {"work": sum(_attention_products(eqn))},
    "dot_product_attention_bwd": _attention_gradients,
}


PHASES = ("forward", "backward", "recompute", "optimizer", "other")


def count_traced(
    jaxpr: core.Jaxpr, platform: str, constants: Sequence[Any] = (), by_source: bool = False
) -> TracedFlops:
    """Return the FLOPs of `jaxpr` by phase and module, and the list of calls without a rule.

    Work that rematerialisation repeats counts as recomputation if its first run is live. If nothing uses the
    first run (the loss itself is rematerialised and its value dropped), the second is the only one and counts
    as forward.

    Args:
        jaxpr: the whole step, with global shapes.
        platform: the platform it is compiled for: cuda | tpu | cpu.
        constants: the values of its `constvars`; kernels read their masks there.
        by_source: give work outside any scope to the function and line that it comes from.
    """
    known = dict(zip(jaxpr.constvars, constants, strict=False))
    alive, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    counter = _Counter(platform, by_source)
    counter.walk(alive, "", Fraction(1), known)
    if counter.again:
        written = _Counter(platform, by_source)
        written.walk(jaxpr, "", Fraction(1), known)
        counter.call_first_what_is_not_repeated(written)
    counts = {key: flops for key, flops in counter.counts.items() if flops}
    if {phase for phase, _ in counts} == {"other"}:  # nothing is differentiated: all work is forward
        counts = {("forward", module): flops for (_, module), flops in counts.items()}
    phases, modules = _Counts(Fraction), _Counts(Fraction)
    for (phase, module), flops in counts.items():
        phases[phase] += flops
        if phase != "recompute":
            modules[module] += flops
    return TracedFlops(
        by_phase={phase: round(phases.get(phase, 0)) for phase in PHASES},  # a share of odd work is no whole
        unpriced=tuple(f"{what} x{times}" for what, times in sorted(counter.unpriced.items())),
        attention=int(counter.attention),
        by_module={module: int(flops) for module, flops in modules.items()},
        by_phase_and_module={
            phase: {module: int(flops) for (its, module), flops in counts.items() if its == phase}
            for phase in PHASES
            if phase in phases
        },
        kernels=tuple(counter.kernels),
        assumptions=tuple(sorted(counter.assumptions)),
        by_source=by_source,
    )


_Counts = defaultdict[Any, Fraction]


_Known = Mapping[Any, Any]


def _inner(eqn: Any, program: Any, known: _Known, constants: int | None = None, first: int = 0) -> _Known:
    """Return the constants that the program of an equation is given, by its own variables.

    Args:
        program: it may be closed over constants of its own.
        constants: how many of its inputs stay the same through its runs; all if not given.
        first: the equation's operand that is the program's first input.
    """
    jaxpr = getattr(program, "jaxpr", program)
    own = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False))
    given = eqn.invars[first:]
    if len(given) != len(jaxpr.invars):
        return own
    passed = zip(jaxpr.invars[:constants], given, strict=False)
    return own | {inner: known[outer] for inner, outer in passed if _is_variable(outer) and outer in known}


def _place_of(eqn: Any) -> str:
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return place_of_frames([(f.file_name, f.function_name, f.start_line) for f in frames])


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")  # a literal has no name, and cannot be looked up


class _Counter:
    def __init__(self, platform: str, by_source: bool) -> None:
        self.platform, self.by_source = platform, by_source
        self.counts = _Counts(Fraction)  # by phase and module
        self.unpriced: Counter[str] = Counter()
        self.kernels: dict[NamedKernel, None] = {}
        self.assumptions: set[str] = set()
        self.attention: Fraction = Fraction(0)
        # FLOPs of products, of their first runs and of those that rematerialisation repeats, by line: the
        # equation's traceback, its primitive, its module, and whether it belongs to attention.
        self.first, self.again = _Counts(Fraction), _Counts(Fraction)
        self._entered = {
            "scan": self._scan,
            "while": self._loop,
            "shard_map": self._shard_map,
            "cond": self._branch,
            LINEAR_SOLVE: self._linear_solve,
            PALLAS: self._kernel,
            FOREIGN: self._kernel,
            MAPPED: self._kernel,
        }

    def walk(self, jaxpr: core.Jaxpr, outer: str, times: Fraction, known: _Known) -> None:
        """Add every equation of `jaxpr`, run `times` times under the scopes `outer`.

        `known`: the values of constants, by variable.
        """
        reversed_kernels = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "rev"}
        for eqn in jaxpr.eqns:
            scopes = f"{outer}/{eqn.source_info.name_stack}"
            name = eqn.primitive.name
            if name == "conv_general_dilated":
                flipped = eqn.invars[1] in reversed_kernels
                gradient = phase_of(scopes) == "backward"
                self._add(scopes, eqn, convolution(eqn, gradient=gradient, flipped=flipped), times)
            elif name in RULES:
                self._add(scopes, eqn, RULES[name](eqn), times)
            elif name in LIBRARY:
                traced_work: Any = room("linear_algebra").traced_work  # outside the core
                self._add(scopes, eqn, traced_work(eqn, jaxpr), times)
            elif (enter := self._entered.get(name)) is not None:
                enter(scopes, eqn, times, known)
            elif name in WALKED and (inner := inner_program(eqn)) is not None:
                self.walk(inner, scopes, times, _inner(eqn, inner, known))
            elif name not in FREE and type(eqn.params.get("_prim")).__name__ not in FREE:
                shapes = ", ".join(str(v.aval) for v in eqn.invars)
                self.unpriced[f"{name}({shapes})"] += int(times)

    def call_first_what_is_not_repeated(self, written: _Counter) -> None:
        """Count repeated work as forward if its first run is only in `written`, which keeps dead code.

        Where a line runs several times and some of its first runs are dead, the live repetition is matched
        with a dead first run.
        """
        for key, again in self.again.items():
            dead = written.first[key] - self.first[key]
            if moved := min(again, dead):
                self.counts["recompute", key[2]] -= moved
                self.counts["forward", key[2]] += moved
                self.attention += moved if key[3] else 0

    def _scan(self, scopes: str, eqn: Any, times: Fraction, known: _Known) -> None:
        body = eqn.params["jaxpr"]
        inner = _inner(eqn, body, known, scan_sizes(eqn.params)[0])
        self.walk(body.jaxpr, scopes, times * eqn.params["length"], inner)

    def _shard_map(self, scopes: str, eqn: Any, times: Fraction, known: _Known) -> None:
        """Add a program with the shapes of one device, once for each device of its manual axes."""
        body, manual = eqn.params["jaxpr"], eqn.params["newly_manual_axes"]
        ways = math.prod(eqn.params["mesh"].shape[axis] for axis in manual)
        self.walk(body, scopes, times * ways, _inner(eqn, body, known))

    def _linear_solve(self, scopes: str, eqn: Any, times: Fraction, known: _Known) -> None:
        """Add the solution of a linear system; the system itself and its transpose serve gradients only."""
        solve = eqn.params["jaxprs"].solve
        self.walk(solve.jaxpr, scopes, times, _inner(eqn, solve, known))

    def _kernel(self, scopes: str, eqn: Any, times: Fraction, known: _Known) -> None:
        """Add a kernel that is one call of the compiled program, or list it as unpriced with the reason."""
        from ._traced_kernels import kernel_of, name_of  # most programs have none

        name = name_of(eqn)
        try:
            counted = kernel_of(eqn, known, FREE, lambda dot: _dot(dot)["work"])
        except Undecided as why:
            shapes = ", ".join(str(v.aval) for v in eqn.invars)
            self.unpriced[f"{eqn.primitive.name} {name}({shapes}): {why}"] += int(times)
            return
        flops = {"work": counted.work, "recompute": counted.recompute}
        self._add(scopes, eqn, flops, times, of_attention=counted.kernel.kind == "attention")
        self.kernels[counted.kernel] = None
        self.assumptions.add(f"kernel {name}: FLOPs by {counted.kernel.source}")
        self.assumptions.update(f"kernel {name}: {note}" for note in counted.notes)

    def _add(
        self, scopes: str, eqn: Any, flops: dict[str, int], times: Fraction, *, of_attention: bool = False
    ) -> None:
        name = eqn.primitive.name
        module = module_of(f"{scopes}/{name}") or (_place_of(eqn) if self.by_source else "")
        of_attention |= "attention" in name or ("needed_" in scopes and "attention" in module.split("/"))
        for part, amount in flops.items():
            scaled = times * amount
            for share in shares_of(scopes).values():
                scaled *= share
            phase = phase_of(scopes) if part == "work" else part
            self.counts[phase, module] += scaled
            line = (eqn.source_info.traceback, name, module, of_attention)
            if phase in ("forward", "other"):
                self.first[line] += scaled
            elif phase == "recompute":
                self.again[line] += scaled
            if of_attention and phase != "recompute":
                self.attention += scaled

    def _loop(self, scopes: str, eqn: Any, times: Fraction, known: _Known) -> None:
        """Add the rounds of a `while`, whose values change; one of unknown length once, as unpriced."""
        from ._rounds import rounds_of

        rounds = expected_trips(scopes)
        if rounds is None:
            rounds = rounds_of(eqn, known, FREE)
        if rounds is None:
            place = scopes.strip("/") or "the step"
            self.unpriced[f"while of unknown length under {place}, counted once"] += 1
        checks = 1 if rounds is None else rounds + 1
        self.walk(eqn.params["cond_jaxpr"].jaxpr, scopes, times * checks, {})
        if rounds != 0:
            self.walk(eqn.params["body_jaxpr"].jaxpr, scopes, times * (rounds or 1), {})

    def _branch(self, scopes: str, eqn: Any, times: Fraction, known: _Known) -> None:
        """Add the target's branch of `platform_dependent`, else the most expensive branch."""
        branches = eqn.params["branches"]
        for branch, platforms in zip(branches, eqn.params.get("branches_platforms") or (), strict=False):
            if platforms is None or self.platform in platforms:  # the default comes last
                self.walk(branch.jaxpr, scopes, times, _inner(eqn, branch, known, first=1))
                return
        counters = [_Counter(self.platform, self.by_source) for _ in branches]
        for counter, branch in zip(counters, branches, strict=True):
            counter.walk(branch.jaxpr, scopes, times, _inner(eqn, branch, known, first=1))
            self.unpriced.update(counter.unpriced)
            self.kernels |= counter.kernels
            self.assumptions |= counter.assumptions
        costliest = max(counters, key=lambda counter: sum(counter.counts.values()))
        self.attention += costliest.attention
        for mine, theirs in (
            (self.counts, costliest.counts),
            (self.first, costliest.first),
            (self.again, costliest.again),
        ):
            for key, flops in theirs.items():
                mine[key] += flops
