"""FLOPs an element of the ATen ops that are bound by memory: small constants, of which only the order of magnitude matters.

Names are overload packets of ``torch.ops.aten``. An op that torch tags as pointwise or as a reduction needs no entry: it costs 1
for each element of its result, or of its argument. A transcendental counts 1, and so does a random draw.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES_DATA = _words(
    """
    alias arange as_strided as_strided_copy as_strided_scatter block_diag broadcast_tensors cat channel_shuffle clone complex
    constant_pad_nd copy detach detach_copy diag_embed diagonal diagonal_backward diagonal_copy diagonal_scatter embedding
    empty empty_like empty_permuted empty_strided expand expand_copy eye fill flip full full_like gather im2col index
    index_copy index_fill index_select lift lift_fresh lift_fresh_copy linspace logspace masked_scatter masked_select
    max_unpool2d max_unpool3d meshgrid narrow new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like pad
    permute permute_copy pixel_shuffle pixel_unshuffle randperm reflection_pad1d reflection_pad2d reflection_pad3d repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape resize roll rot90 scalar_tensor scatter
    select select_backward select_copy select_scatter slice slice_backward slice_copy slice_scatter split split_copy
    split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack t take to transpose transpose_copy tril tril_indices triu
    triu_indices unbind unbind_copy unfold unfold_backward unfold_copy unsqueeze unsqueeze_copy upsample_nearest1d
    upsample_nearest2d upsample_nearest3d view view_as_complex view_as_real view_copy where zero zeros zeros_like
    masked_scatter_backward unsafe_split unsafe_split_with_sizes _chunk_cat _lazy_clone _neg_view _stack _unsafe_masked_index
    _conj _copy_from _copy_from_and_resize _local_scalar_dense _neg_view_copy _reshape_alias _reshape_copy _to_copy
    _unsafe_index _unsafe_view _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar sym_size
    """
)
"""0 FLOPs: known, and not the same as unknown. Assertions are among them."""

_INPUT_COSTS = {
    1: """
        _embedding_bag_dense_backward _upsample_nearest_exact3d_backward all amax amin any argmax argmin bincount
        count_nonzero cummax cummin cumprod cumsum max mean median min mode nanmedian nansum prod sum trace
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d_backward
        _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward col2im
        embedding_dense_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward upsample_nearest1d_backward upsample_nearest2d_backward
        upsample_nearest3d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    """,
    2: "aminmax histc linalg_vector_norm norm native_dropout_backward",
    3: "dist log_sigmoid_forward logcumsumexp logsumexp mse_loss renorm",
    # Softmax backward: grad * out, its sum, out * sum, the difference. Variance: mean 1, deviation, square, sum.
    4: """
        log_sigmoid_backward std std_mean var var_mean _masked_softmax_backward _softmax_backward_data
        _log_softmax_backward_data smooth_l1_loss huber_loss soft_margin_loss upsample_linear1d_backward
        _batch_norm_no_update _native_batch_norm_legit_no_training batch_norm_stats batch_norm_elemt
        batch_norm_update_stats batch_norm_backward_reduce
    """,
    # Softmax: maximum, difference, exponential, sum, quotient.
    5: """
        _softmax _log_softmax _safe_softmax _masked_softmax binary_cross_entropy binary_cross_entropy_with_logits
        _fused_rms_norm _thnn_fused_gru_cell _thnn_fused_lstm_cell
    """,
    6: "batch_norm_backward_elemt",
    # A norm: mean 1, variance 3, normalise 2, affine 2.
    8: """
        native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        _batch_norm_with_update _batch_norm_with_update_functional cudnn_batch_norm upsample_bilinear2d_backward
        _upsample_bilinear2d_aa_backward
    """,
    10: "_fused_rms_norm_backward _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell_backward_impl",
    # A norm's backward: the gradients of scale and shift 3, two sums over a row 4, three multiply-adds.
    12: """
        native_layer_norm_backward native_group_norm_backward native_batch_norm_backward batch_norm_backward
        cudnn_batch_norm_backward
    """,
    16: "grid_sampler_2d_backward upsample_trilinear3d_backward",
    32: "grid_sampler_3d_backward upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward",
}

_OUTPUT_COSTS = {
    1: """
        bernoulli bucketize elu_backward floor_divide hardshrink_backward hardsigmoid_backward hardtanh_backward isin
        leaky_relu_backward random rrelu_with_noise rrelu_with_noise_backward softshrink_backward multinomial normal
        normal_functional one_hot poisson prelu rand rand_like randint randint_like randn randn_like searchsorted uniform
        _prelu_kernel
    """,
    2: "cauchy exponential geometric log_normal native_dropout rrelu_with_noise_functional _prelu_kernel_backward",
    3: "addcdiv addcmul hardswish hardswish_backward softplus_backward glu lerp linalg_cross mse_loss_backward _cdist_backward",
    4: "huber_loss_backward smooth_l1_loss_backward soft_margin_loss_backward upsample_linear1d _weight_norm_interface",
    5: "binary_cross_entropy_backward glu_backward glu_jvp",
    # Interpolation: a weighted sum of 4, 8 or 16 points.
    8: "upsample_bilinear2d _upsample_bilinear2d_aa _weight_norm_interface_backward",
    16: "grid_sampler_2d upsample_trilinear3d",
    32: "grid_sampler_3d upsample_bicubic2d _upsample_bicubic2d_aa",
}

PER_INPUT: dict[str, int] = {name: cost for cost, names in _INPUT_COSTS.items() for name in _words(names)}
"""FLOPs for each element of the first argument: reductions, norms, and gradients by the gradient that comes in."""

PER_OUTPUT: dict[str, int] = {name: cost for cost, names in _OUTPUT_COSTS.items() for name in _words(names)}
"""FLOPs for each element of the (first) result."""
