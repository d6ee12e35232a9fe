"""Operations without products of matrices: elementwise, reductions, selection, movement, creation. No torch.

By convention they count no FLOPs (the ledger counts none for them either). PyTorch's own tags say it of
most; the names here are of those without a tag. An operation that is neither here nor has a rule is unknown.
"""

from __future__ import annotations

import re

# Whole names, without "aten." and without the underscore of an in-place form.
NAMES = frozenset(
    """
_amp_foreach_non_finite_check_and_unscale _amp_update_scale _assert_async _assert_scalar
_assert_tensor_metadata _chunk_cat _coalesce _coalesced _cummax_helper _cummin_helper _dimI _dimV
_efficientzerotensor _euclidean_norm _fill_mem_eff_dropout_mask _functional_assert_async
_functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size
_fused_dropout _fused_rms_norm _fused_rms_norm_backward _fused_sdp_choice _has_same_storage_numel _indices
_is_all_true _is_any_true _lazy_clone _local_scalar_dense _log_softmax _log_softmax_backward_data
_logcumsumexp _masked_scale _masked_softmax _masked_softmax_backward _nnz _pack_padded_sequence
_pad_packed_sequence _pin_memory _prelu_kernel _prelu_kernel_backward _print _resize_output _safe_softmax
_segment_reduce_backward _softmax _softmax_backward_data _stack _sparse_coo_tensor_with_dims
_sparse_coo_tensor_with_dims_and_tensors _sparse_sum_backward _standard_gamma _standard_gamma_grad
_sample_dirichlet _dirichlet_grad _to_copy _to_dense _to_sparse _transform_bias_rescale_qkv _unique _unique2
_unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view _values
_weight_norm_interface _weight_norm_interface_backward all allclose amax amin aminmax any arange argmax argmin
bartlett_window bernoulli bincount binomial blackman_window block_diag bucketize cat cauchy channel_shuffle
clone col2im complex constant_pad_nd copy count_nonzero cummax cummin cumprod cumsum dense_dim detach
diag_embed diagonal_backward diagonal_scatter dist elu_backward embedding embedding_dense_backward
embedding_renorm empty empty_like empty_permuted empty_strided equal exponential eye fill flip from_file full
full_like gather geometric glu glu_backward hamming_window hann_window hash_tensor histc im2col index
index_add index_copy index_fill index_put _index_put_impl index_reduce index_select is_coalesced is_pinned
is_same_size is_set_to isin item kaiser_window kthvalue lift lift_fresh lift_fresh_copy linalg_cross
linalg_vector_norm linspace log_normal log_sigmoid_backward log_sigmoid_forward logcumsumexp logspace
logsumexp masked_fill masked_scatter masked_scatter_backward masked_select max max_unpool2d max_unpool3d mean
median min mode multinomial nan_to_num nanmedian nansum narrow_copy native_dropout native_dropout_backward
new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_static norm normal normal_functional
ones ones_like pixel_shuffle pixel_unshuffle poisson polar prod put rand rand_like randint randint_like randn
randn_like random randperm range record_stream renorm repeat repeat_interleave resize resize_as roll rot90
rrelu_with_noise rrelu_with_noise_backward rrelu_with_noise_functional scalar_tensor scatter scatter_add
scatter_reduce searchsorted segment_reduce select_backward select_scatter set set_ slice_backward
slice_scatter sort sparse_dim sparse_resize sparse_resize_and_clear split_with_sizes squeeze stack std
std_mean sum sum_to_size sym_constrain_range sym_constrain_range_for_size take take_along_dim to_padded_tensor
topk trace tril tril_indices triu triu_indices unfold_backward uniform unique_consecutive unique_dim
unique_dim_consecutive unsafe_split unsafe_split_with_sizes value_selecting_reduction_backward var var_mean
zero zeros zeros_like _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
_thnn_fused_lstm_cell_backward_impl _add_relu _batch_norm_no_update _conj _conj_physical _neg_view
resolve_conj resolve_neg _cudnn_init_dropout_state _cudnn_rnn_flatten_weight _ctc_loss _ctc_loss_backward
_cudnn_ctc_loss _use_cudnn_ctc_loss affine_grid_generator cudnn_affine_grid_generator
cudnn_affine_grid_generator_backward cudnn_grid_sampler cudnn_grid_sampler_backward
_grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward as_strided_scatter glu_jvp
glu_backward_jvp
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
