"""Count the FLOPs of one PyTorch operation from the shapes and attributes of its call. Imports no torch.

`OperationCall` holds the arguments by the names of the operation's schema.
Counted: matrix products, convolutions, attention, recurrent layers. A multiply-add is two FLOPs; with complex
numbers it is eight. The conventions are those of the model FLOPs in `meshwright.ledger`: a convolution counts
every tap of its window at every output, including those on padding. Fused attention has two products forward
and five backward, one of which repeats the scores (Dao et al. 2022, arXiv 2205.14135). `is_causal` counts the
allowed pairs of positions exactly: row i of the queries sees keys 0 to i (PyTorch aligns the mask at the top
left). A mask given as a tensor counts in full, since its zeros are data. If query heads share key heads,
every query head counts.
Not counted: operations without matrix products (elementwise, reductions, selection, sorts, movement,
creation). The ledger counts no FLOPs for them either. PyTorch's own tags identify most of them, and
`is_silent` the rest.
Unknown: an operation that has no rule and is not silent, and a call whose rule returns None because its work
depends on data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.errors import InputError
from meshwright.formats import format_of_dtype

OWN_NAMESPACE = "meshwright."  # of operations that stand for kernels
OTHERS = {
    "complex32": "complex fp16",
    "complex64": "complex fp32",
    "complex128": "complex fp64",
    "float4_e2m1fn_x2": "fp4-e2m1",
}


@dataclass(frozen=True, slots=True)
class OperationCall:
    """An operation with its arguments and its result."""

    name: str  # "aten.mm"
    arguments: dict[str, Any]
    result: Any

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def shape(self, argument: str) -> tuple[int, ...]:
        """Return the shape of a tensor argument."""
        return tuple(int(size) for size in self.arguments[argument].shape)

    def tensors(self) -> list[Any]:
        """Return the tensors among the arguments, including those in lists, in the schema's order."""
        lists = [value if isinstance(value, list | tuple) else (value,) for value in self.arguments.values()]
        return [item for items in lists for item in items if _is_tensor(item)]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(tensor_text, self.tensors()))})"


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OperationCall:
    """Return the call, with defaults filled in from the schema of `func`, an OpOverload."""
    schema = func._schema
    named: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        if place < len(args) and not argument.kwarg_only:
            named[argument.name] = args[place]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value
    return OperationCall(operation_name(func), named, result)


def operation_name(func: Any) -> str:
    """Return an operation's name without its overload: "aten.mm", "aten._grouped_mm", "mylib.scan"."""
    return func._schema.name.replace("::", ".")


def format_name(dtype: Any) -> str:
    """Return our name of a torch dtype, as "bf16", or torch's own name if we have none."""
    name = str(dtype).removeprefix("torch.")
    if name in OTHERS:
        return OTHERS[name]
    try:
        return format_of_dtype(name).name
    except InputError:
        return name


def tensor_text(tensor: Any) -> str:
    """Return a tensor's format and shape: "bf16[8, 1024]"."""
    return f"{format_name(tensor.dtype)}[{', '.join(str(size) for size in tensor.shape)}]"


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "dtype")


# Arguments of packed sequences, whose lengths are data, and of windows, which no public layer sets.
LENGTHS_IN_DATA = ("cum_seq_q", "cu_seqlens_q", "window_size_left", "window_size_right", "window_size")


def allowed_pairs(queries: int, keys: int, *, causal: bool) -> int:
    """Return the number of pairs of query and key positions that the mask allows."""
    if not causal:
        return queries * keys
    shorter = min(queries, keys)
    return shorter * (shorter + 1) // 2 + (queries - shorter) * keys


def _products(call: OperationCall, *, sequence: int, heads: int) -> tuple[int, int] | None:
    """Return FLOPs of one product over the head's width and one over the values'; None if data decide."""
    corner = call.arguments.get("custom_mask_type")  # 1: causal from the top left; 2: from the bottom right
    if corner == 2 or any(call.arguments.get(name) is not None for name in LENGTHS_IN_DATA):
        return None
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    causal = corner == 1 or bool(call.arguments.get("is_causal"))
    pairs = query[0] * query[heads] * allowed_pairs(query[sequence], key[sequence], causal=causal)
    return 2 * pairs * query[-1], 2 * pairs * value[-1]


def _forward(call: OperationCall, *, sequence: int = -2, heads: int = -3) -> int | None:
    products = _products(call, sequence=sequence, heads=heads)
    return None if products is None else sum(products)


def _backward(call: OperationCall, *, sequence: int = -2, heads: int = -3) -> tuple[int, int] | None:
    """Count the backward pass, and the recomputed scores in it.

    The gradients of queries and keys and the scores are three products over the head's width. The gradients
    of values and of attention weights are two products over the values' width.
    """
    products = _products(call, sequence=sequence, heads=heads)
    if products is None:
        return None
    scores, values = products
    return 3 * scores + 2 * values, scores


_KINDS = (
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable",
)  # fmt: skip
_SEQUENCE_FIRST = ("flash", "efficient")


def _flex(call: OperationCall) -> int:
    pairs = int(call["pairs"])  # of all heads of queries
    return 2 * pairs * (call.shape("query")[-1] + call.shape("value")[-1])


def _flex_backward(call: OperationCall) -> tuple[int, int]:
    pairs, width = int(call["pairs"]), call.shape("query")[-1]
    return 2 * pairs * (3 * width + 2 * call.shape("value")[-1]), 2 * pairs * width


ATTENTION_RULES = {
    **{f"_scaled_dot_product_{kind}": _forward for kind in _KINDS},
    **{f"_scaled_dot_product_{kind}_backward": _backward for kind in _KINDS},
    # The kernels that those call. Flash and efficient attention take [batch, sequence, heads, head_dim].
    # cuDNN takes [batch, heads, sequence, head_dim].
    **{f"_{kind}_attention_forward": partial(_forward, sequence=-3, heads=-2) for kind in _SEQUENCE_FIRST},
    **{f"_{kind}_attention_backward": partial(_backward, sequence=-3, heads=-2) for kind in _SEQUENCE_FIRST},
    "_cudnn_attention_forward": _forward,
    "_cudnn_attention_backward": _backward,
    "flex_attention": _flex,
    "flex_attention_backward": _flex_backward,
}


# Whole names, without "aten." and without the underscore of an in-place form.
NAMES = frozenset(
    """
_add_relu affine_grid_generator all allclose amax amin _aminmax aminmax
_amp_foreach_non_finite_check_and_unscale _amp_update_scale any arange argmax argmin as_strided_scatter
_assert_async _assert_scalar _assert_tensor_metadata bartlett_window _batch_norm_no_update bernoulli bincount
binomial blackman_window block_diag bucketize cat cauchy channel_shuffle _chunk_cat clone _coalesce _coalesced
col2im complex _conj _conj_physical constant_pad_nd copy count_nonzero _ctc_loss _ctc_loss_backward
cudnn_affine_grid_generator cudnn_affine_grid_generator_backward _cudnn_ctc_loss cudnn_grid_sampler
cudnn_grid_sampler_backward _cudnn_init_dropout_state _cudnn_rnn_flatten_weight cummax _cummax_helper cummin
_cummin_helper cumprod cumsum dense_dim dequantize detach diag_embed diagonal_backward diagonal_scatter _dimI
_dimV _dirichlet_grad dist _efficientzerotensor elu_backward embedding embedding_dense_backward
embedding_renorm empty empty_like empty_permuted empty_strided equal exponential eye fft_fftfreq fft_rfftfreq
fill _fill_mem_eff_dropout_mask flip floor_divide from_file full full_like _functional_assert_async
_functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size
_fused_dropout _fused_rms_norm _fused_rms_norm_backward _fused_sdp_choice gather geometric glu glu_backward
glu_backward_jvp glu_jvp _grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward hamming_window
hann_window hardswish _has_same_storage_numel hash_tensor histc histogram _histogramdd_bin_edges
_histogramdd_from_bin_cts _histogramdd_from_bin_tensors im2col index index_add index_copy index_fill index_put
_index_put_impl index_reduce index_select _indices int_repr _is_all_true _is_any_true is_coalesced is_pinned
is_same_size is_set_to isin item _jagged_to_padded_dense_forward kaiser_window kthvalue _lazy_clone lift
lift_fresh lift_fresh_copy _linalg_check_errors linalg_cross linalg_vector_norm linspace _local_scalar_dense
log_normal log_sigmoid_backward log_sigmoid_forward log_softmax _log_softmax _log_softmax_backward_data
_logcumsumexp logcumsumexp logspace logsumexp lu_unpack masked_fill _masked_scale masked_scatter
masked_scatter_backward masked_select _masked_softmax _masked_softmax_backward max max_unpool2d max_unpool3d
mean median min mode multinomial nan_to_num nanmedian nansum narrow_copy native_dropout
native_dropout_backward _neg_view new_empty new_empty_strided new_full new_ones new_zeros _nnz nonzero
nonzero_static norm normal normal_functional ones ones_like _pack_padded_sequence _pad_packed_sequence
_padded_dense_to_jagged_forward _philox_key_fold_in _philox_key_split _philox_normal _philox_uniform
_pin_memory pixel_shuffle pixel_unshuffle poisson polar _prelu_kernel _prelu_kernel_backward _print prod put
q_scale q_zero_point qscheme quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic rand
rand_like randint randint_like randn randn_like random randperm range record_stream renorm repeat
repeat_interleave resize resize_as resize_as_sparse _resize_output resolve_conj resolve_neg roll rot90
rrelu_with_noise rrelu_with_noise_backward rrelu_with_noise_functional _safe_softmax _sample_dirichlet
scalar_tensor scatter scatter_add scatter_reduce searchsorted segment_reduce _segment_reduce_backward
select_backward select_scatter set set_ slice_backward slice_scatter _softmax softmax _softmax_backward_data
sort _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors sparse_dim _sparse_log_softmax
sparse_mask sparse_resize sparse_resize_and_clear _sparse_softmax _sparse_sum _sparse_sum_backward
split_with_sizes squeeze _stack stack _standard_gamma _standard_gamma_grad std std_mean sum sum_to_size
sym_constrain_range sym_constrain_range_for_size take take_along_dim _thnn_fused_gru_cell
_thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _to_copy _to_dense
to_padded_tensor _to_sparse topk trace _transform_bias_rescale_qkv tril tril_indices triu triu_indices
unfold_backward uniform _unique _unique2 unique_consecutive unique_dim unique_dim_consecutive _unsafe_index
_unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate unsafe_split
unsafe_split_with_sizes _unsafe_view _use_cudnn_ctc_loss value_selecting_reduction_backward _values var
var_mean _weight_norm_interface _weight_norm_interface_backward zero zeros zeros_like
""".split()  # noqa: SIM905  a thousand quotes less
)

# Families of names.
_FAMILIES = re.compile(
    r"_foreach_(?!mm$).*|_fused_(sgd|adam|adamw|adagrad)"
    r"|_?embedding_bag.*|_?(native_|cudnn_|miopen_)?(batch|layer|group)_norm.*|_native_batch_norm.*"
    r"|_batch_norm_with_update.*|native_norm"
    r"|_?(adaptive_|fractional_|mkldnn_)?(adaptive_)?(avg|max)_pool\dd.*|_?upsample_.*|grid_sampler_\dd.*"
    r"|(reflection|replication)_pad\dd.*|(binary_cross_entropy|nll_loss|mse_loss|smooth_l1_loss|huber_loss).*"
    r"|(soft_margin_loss|multi_margin_loss|multilabel_margin_loss).*|kl_div.*|_?fake_quantize_.*"
    r"|(hard|soft|leaky_relu|elu|gelu|silu|mish|celu|selu|sigmoid|tanh|threshold|logit|polygamma)\w*_backward"
    r"|.*_copy"
)


def is_silent(name: str) -> bool:
    """Return True if an ATen operation of this name ("cumsum_", "native_norm") has no matrix products."""
    bare = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return bare in NAMES or _FAMILIES.fullmatch(bare) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFlops:
    """The FLOPs of one call; `recomputed_flops` is the part that repeats work of the forward pass."""

    flops: int
    recomputed_flops: int = 0
    format: str


Flops = int | tuple[int, int] | None  # FLOPs, perhaps with the part that repeats the forward pass


def flops_of(call: OperationCall) -> OperationFlops | None:
    """Return the FLOPs of a call by its rule; None if it has no rule, or the rule cannot decide.

    Source: the operations' definitions in PyTorch's native_functions.yaml.
    """
    rule = RULES.get(call.name.removeprefix("aten.").removeprefix(OWN_NAMESPACE))
    count = None if rule is None else rule(call)
    if count is None:
        return None
    flops, recomputed = count if isinstance(count, tuple) else (count, 0)
    # PyTorch does not multiply complex with real tensors: all of a call's tensors are complex, or none is.
    real = 4 if any(tensor.dtype.is_complex for tensor in call.tensors()) else 1
    return OperationFlops(flops=real * flops, recomputed_flops=real * recomputed, format=_format(call))


def _format(call: OperationCall) -> str:
    """Return the format of the product's first operand, not of a bias added to it."""
    named = (call.arguments.get(name) for name in ("mat1", "batch1", "mat"))
    first = next((tensor for tensor in named if tensor is not None), None)
    return format_name((call.tensors()[0] if first is None else first).dtype)


def _product(left: str, right: str) -> Callable[[OperationCall], Flops]:
    """Make the rule for [..., m, k] x [..., k, n], [m, k] x [k], or [k] x [k].

    The leading dimensions are those of the left operand.
    """

    def rule(call: OperationCall) -> Flops:
        rows, columns = call.shape(left), call.shape(right)
        packed = 2 if str(call[left].dtype).endswith("_x2") else 1  # two narrow numbers in one element
        return 2 * packed * math.prod(rows) * (columns[-1] if len(columns) > 1 else 1)

    return rule


def _outer(call: OperationCall) -> Flops:
    return 2 * math.prod(call.shape("vec1")) * math.prod(call.shape("vec2"))


def _grouped(call: OperationCall) -> Flops:
    """Count each row with the matrix of its own group only, so that groups do not multiply the work."""
    left, right = call.shape("self"), call.shape("mat2")
    if len(left) == 3 and len(right) == 2:  # the groups divide the right matrix's columns
        return 2 * left[-2] * left[-1] * right[-1]
    return 2 * math.prod(left) * right[-1]


def _each_product(call: OperationCall) -> Flops:
    pairs = zip(call["self"], call["mat2"], strict=True)
    return sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right in pairs)


def _convolution(call: OperationCall) -> Flops:
    image, kernel = call.shape("input"), call.shape("weight")
    return _convolution_flops(call, image, kernel, tuple(int(size) for size in call.result.shape))


def _convolution_backward(call: OperationCall) -> Flops:
    """Count a forward pass for each wanted gradient of input and weight; the bias's gradient is a sum."""
    one = _convolution_flops(call, call.shape("input"), call.shape("weight"), call.shape("grad_output"))
    return one * sum(bool(wanted) for wanted in call["output_mask"][:2])


def _convolution_flops(
    call: OperationCall, image: tuple[int, ...], kernel: tuple[int, ...], result: tuple[int, ...]
) -> int:
    """Count 2 x batch x kernel elements x kernel positions: the outputs, or the inputs if transposed."""
    dims = len(kernel) - 2
    batch = image[0] if len(image) == len(kernel) else 1
    positions = (image if call["transposed"] else result)[-dims:]
    return 2 * batch * math.prod(kernel) * math.prod(positions)


def _recurrent(call: OperationCall) -> int:
    """Count cuDNN's layers: input and hidden state meet their matrices at each position of each sequence."""
    positions = math.prod(call.shape("input")[:-1])
    return 2 * positions * sum(math.prod(weight.shape) for weight in call["weight"] if weight.dim() == 2)


def _recurrent_backward(call: OperationCall) -> Flops:
    """Count the input's gradients, which cuDNN always computes, and the weights' if they are wanted."""
    return _recurrent(call) * (1 + bool(call["output_mask"][3]))


def _encoder_layer(call: OperationCall) -> Flops:
    """Count PyTorch's fused inference kernel: projections, attention over all pairs, two MLP layers."""
    batch, length, width = call.shape("src")
    names = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    weights = sum(math.prod(call.shape(name)) for name in names)
    return 2 * batch * length * weights + 4 * batch * length * length * width


def _self_attention_layer(call: OperationCall) -> Flops:
    batch, length, width = call.shape("query")
    keys = call.shape("key")[1]
    rows_by_keys = 4 * batch * length * keys * width
    project_in = 2 * batch * (length + 2 * keys) * width * width
    return project_in + rows_by_keys + 2 * batch * length * math.prod(call.shape("proj_weight"))


RULES: dict[str, Callable[[OperationCall], Flops]] = {
    "mm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2"),
    "_addmm_activation": _product("mat1", "mat2"),
    "bmm": _product("self", "mat2"),
    "baddbmm": _product("batch1", "batch2"),
    "addbmm": _product("batch1", "batch2"),
    "mv": _product("self", "vec"),
    "addmv": _product("mat", "vec"),
    "dot": _product("self", "tensor"),
    "vdot": _product("self", "other"),
    "addr": _outer,
    "_int_mm": _product("self", "mat2"),
    "_scaled_mm": _product("self", "mat2"),
    "_scaled_mm_v2": _product("self", "mat2"),
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_grouped_mm_v2": _grouped,
    "_foreach_mm": _each_product,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_native_multi_head_attention": _self_attention_layer,
    **ATTENTION_RULES,
}
RULES |= {f"{name}_": RULES[name] for name in ("addmm", "baddbmm", "addbmm", "addmv", "addr")}
