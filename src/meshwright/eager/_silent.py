"""Operations without products of matrices: elementwise, reductions, selection, movement, creation. No torch.

By convention they count no FLOPs (the ledger counts none for them either). PyTorch's own tags say it of
most; the names here are of those without a tag. An operation that is neither here nor has a rule is unknown.
"""

from __future__ import annotations

import re

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
    """Whether an ATen operation of this name ("cumsum_", "native_norm") holds no products of matrices."""
    bare = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return bare in NAMES or _FAMILIES.fullmatch(bare) is not None
