"""FLOPs of one JAX equation, and the primitives known to hold no matrix product. No jax is imported.

A primitive is in one of three groups: `RULES` gives its FLOPs, `WALKED` runs a program that stands in its
parameters, `FREE` multiplies no matrices. Whatever is in none of them is unpriced, a primitive of a later
release of JAX or of the user's own included. `_traced` itself enters `scan`, `while`, `cond` and `shard_map`.

Counted: a multiply-add is two FLOPs, of complex numbers eight (four products, four sums), of a complex and a
real number four. A convolution counts every tap of its window at every output, those on padding included;
those on the holes that dilation opens in its input are left out. Sources: the primitives' definitions in
`jax.lax`; attention: Dao et al. 2022, arXiv 2205.14135; `symmetric_product`: LAPACK Working Note 41,
appendix C (SYRK: n (n + 1) k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# The parameter in which a primitive keeps the program that it runs once.
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
check consume dce_sink debug_callback debug_print inspect_sharding print_layout
"""
FREE = frozenset(
    f"{_ELEMENTWISE} {_REDUCTIONS_AND_SORTS} {_MOVEMENT_AND_CREATION} {_COLLECTIVES} "
    f"{_RANDOM_AND_DEBUGGING}".split()
)

Rule = Callable[[Any], dict[str, int]]
"""From an equation to its FLOPs: `work` of the phase it stands in, `recompute` where it repeats some."""


def program_in(eqn: Any) -> Any:
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
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, right = eqn.invars[:2]
    products = math.prod(eqn.outvars[0].aval.shape) * _sizes(left.aval.shape, contracted)
    return {"work": _multiply_add(left, right) * products}


def _ragged_dot(eqn: Any) -> dict[str, int]:
    """Each row meets the matrix of its own group only, so the groups do not multiply the work."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right = eqn.invars[:2]
    columns = _sizes_beside(right.aval.shape, contracted, batch, numbers.rhs_group_dimensions)
    return {"work": _multiply_add(left, right) * math.prod(left.aval.shape) * columns}


def _scaled_matmul(eqn: Any) -> dict[str, int]:
    """[batch, m, k] x [batch, n, k], both scaled block by block."""
    left, right = eqn.invars[:2]
    return {"work": _multiply_add(left, right) * math.prod(left.aval.shape) * right.aval.shape[1]}


def _symmetric_product(eqn: Any) -> dict[str, int]:
    """A A^T of [..., n, k]: one triangle with its diagonal; the other is the same numbers."""
    *batch, n, k = eqn.invars[0].aval.shape
    factor = _multiply_add(eqn.invars[0], eqn.invars[0])
    return {"work": factor * math.prod(batch) * (n * (n + 1) // 2) * k}


def _bcoo_dot(eqn: Any) -> dict[str, int]:
    """Each stored element, padding among them included, meets the free dimensions of the dense side."""
    data, indices, dense = eqn.invars
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    num_batch = len(indices.aval.shape) - 2
    stored = math.prod((*eqn.params["lhs_spinfo"].shape[:num_batch], *data.aval.shape[num_batch:]))
    return {"work": _multiply_add(data, dense) * stored * _sizes_beside(dense.aval.shape, contracted, batch)}


def _bcoo_dot_sampled(eqn: Any) -> dict[str, int]:
    """A product of dense arrays at the stored places alone."""
    left, right = eqn.invars[:2]
    (contracted, _), _ = eqn.params["dimension_numbers"]
    products = math.prod(eqn.outvars[0].aval.shape) * _sizes(left.aval.shape, contracted)
    return {"work": _multiply_add(left, right) * products}


def convolution(eqn: Any, *, gradient: bool, flipped: bool) -> dict[str, int]:
    """FLOPs of a convolution, counted in the backward pass as in the forward pass that it belongs to.

    A convolution has three sizes along each dimension: of input, window and output. Forward, window x output
    counts, of one that is transposed (it dilates its input) window x input. JAX writes both gradients as
    convolutions with these roles exchanged, and the same pairs are counted there.

    Args:
        gradient: it stands in the backward pass.
        flipped: its kernel was reversed: it is the gradient of an input.
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
    # The kernel's input features are those of one group already; a batch group sums over its share.
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    batch_share = image[numbers.lhs_spec[0]] // params["batch_group_count"]
    assert batch == batch_share, f"output batch {batch}, expected {batch_share}"
    factor = _multiply_add(*eqn.invars[:2])
    return {"work": factor * pairs * batch * features * kernel[numbers.rhs_spec[1]]}


def _scores(eqn: Any) -> int:
    """FLOPs of one of cuDNN attention's matmuls; query [batch, q, heads, head_dim]."""
    query, key = (v.aval.shape for v in eqn.invars[:2])
    heads_first = eqn.params["layout"] == 1  # BNTH
    q_length, heads = (query[2], query[1]) if heads_first else (query[1], query[2])
    k_length = key[2] if heads_first else key[1]
    flops = 2 * query[0] * heads * q_length * k_length * query[3]
    return flops // 2 if "CAUSAL" in str(eqn.params["mask_type"]) else flops


RULES: dict[str, Rule] = {
    "dot_general": _dot,
    "scaled_dot": _dot,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
    "symmetric_product": _symmetric_product,
    "bcoo_dot_general": _bcoo_dot,
    "bcoo_dot_general_sampled": _bcoo_dot_sampled,
    "dot_product_attention_fwd_wrapper": lambda eqn: {"work": 2 * _scores(eqn)},
    # Four gradients' matmuls, and the scores once more: the flash kernel does not keep them.
    "dot_product_attention_bwd_wrapper": lambda eqn: {"work": 4 * _scores(eqn), "recompute": _scores(eqn)},
}
