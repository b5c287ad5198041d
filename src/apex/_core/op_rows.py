"""The rows of the op table and what torch's autocast does differently, as data.

A row names an aten operator, and its overload if it is not the default one. The functions are those
of apex's lists (``amp.lists``); newer functions of the same families are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Category = Literal[
    "low_precision",
    "fp32",
    "promote",
    "banned",
    "destination",
    "fp32_inplace",
    "recurrent",
]
"""How a row casts an operator's arguments.

``low_precision``: all to the region's dtype; sparse operands go to fp32.
``fp32``: all to fp32; a ``dtype=`` argument is kept.
Both leave calls with only float64 tensors unchanged.
``promote``: all to the widest floating-point dtype among them.
``banned``: as ``fp32``, but fp16 raises NotImplementedError.
``destination``: all to the dtype of the tensor that is written to: ``self``, or ``out``.
``fp32_inplace``: none; a low-precision ``self``, which cannot hold an fp32 result, raises
NotImplementedError (``x **= 2`` makes a new fp32 tensor).
``recurrent``: input, state and weights of a whole RNN to the region's dtype.
"""

PRODUCTS = "addmm addmv addr matmul mm mv addbmm baddbmm bmm"

UNARY = """
acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan cumprod cumsum renorm
"""

NORM = """
linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord norm.Scalar norm.ScalarOpt_dim
norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype nuclear_norm nuclear_norm.dim frobenius_norm.dim
"""  # torch.norm calls linalg's operators; saved programs call the others

PINVERSE = """
linalg_pinv linalg_pinv.rcond_tensor linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor
"""

RESIZES = """
upsample_nearest1d upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec
upsample_nearest3d upsample_nearest3d.vec upsample_linear1d upsample_linear1d.vec
upsample_bilinear2d upsample_bilinear2d.vec upsample_trilinear3d upsample_trilinear3d.vec
upsample_bicubic2d upsample_bicubic2d.vec _upsample_nearest_exact1d _upsample_nearest_exact1d.vec
_upsample_nearest_exact2d _upsample_nearest_exact2d.vec _upsample_nearest_exact3d
_upsample_nearest_exact3d.vec _upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec
_upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec _upsample_lanczos2d_aa _upsample_lanczos2d_aa.vec
"""

WITHOUT_BF16 = """
cholesky cholesky_inverse cholesky_solve geqrf inverse orgqr ormqr qr svd triangular_solve
quantile quantile.scalar nanquantile nanquantile.scalar stft stft.center
complex polar view_as_complex
histogram.bin_ct histogramdd histogramdd.int_bins
linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_det linalg_eig linalg_eigh
linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor
linalg_lu_factor_ex linalg_lu_solve linalg_matrix_rank linalg_matrix_rank.tol_tensor
linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_sqrth
linalg_polar linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular
linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander logdet
fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft
fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
special_zeta special_chebyshev_polynomial_t special_chebyshev_polynomial_u
special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_erfcx special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
"""
"""fp32 rows that have no kernel in bf16, and most none in fp16."""

WRITES = """
index_add index_copy index_put index_reduce masked_scatter put scatter_add scatter.src
scatter.reduce scatter_reduce.two
"""
"""Operators that write one tensor into another, which torch wants of the same dtype."""

ROWS: Mapping[Category, str] = {
    "low_precision": f"""
{PRODUCTS} prelu linear einsum tensordot scaled_dot_product_attention linalg_multi_dot chain_matmul
linalg_vecdot convolution conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding
conv_transpose1d conv_transpose2d.input conv_transpose3d.input conv_tbc lstm_cell gru_cell
rnn_tanh_cell rnn_relu_cell _grouped_mm
""",
    "fp32": f"""
{UNARY} {NORM} {RESIZES} {WITHOUT_BF16}
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar dist logsumexp logcumsumexp trace prod prod.dim_int
std std.dim std.correction std_mean std_mean.dim std_mean.correction sum sum.dim_IntList
var var.dim var.correction var_mean var_mean.dim var_mean.correction
softplus gelu layer_norm group_norm rms_norm softmax.int log_softmax.int grid_sampler
cosine_similarity cdist pdist poisson_nll_loss cosine_embedding_loss hinge_embedding_loss kl_div
l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multi_margin_loss smooth_l1_loss
huber_loss soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits
cross_entropy_loss nll_loss_nd nll_loss nll_loss2d ctc_loss.IntList ctc_loss.Tensor
fused_moving_avg_obs_fake_quant histogram.bins_tensor histogramdd.TensorList_bins
smm hspmm sspaddmm _sparse_mm _sparse_mm.reduce _sparse_addmm sparse_sampled_addmm
{PINVERSE} linalg_matrix_exp cov corrcoef
""",  # torch composes the last line, formulas of gradients included, of matrix products
    "promote": """
addcdiv addcmul atan2 cross linalg_cross bilinear dot vdot equal isclose allclose heaviside
lerp.Scalar lerp.Tensor meshgrid meshgrid.indexing cartesian_prod
embedding_bag embedding_bag.padding_idx
""",
    "banned": "binary_cross_entropy",
    "destination": f"""
addmm_ addmv_ addr_ addbmm_ baddbmm_ {" ".join(f"{name}.out" for name in PRODUCTS.split())}
{WRITES}
index_add_ index_copy_ index_put_ index_reduce_ masked_scatter_ put_ scatter_add_ scatter_.src
scatter_.reduce scatter_reduce_.two lerp_.Scalar lerp_.Tensor heaviside_ square_
""",
    "fp32_inplace": f"{' '.join(f'{name}_' for name in UNARY.split())} pow_.Scalar pow_.Tensor",
    "recurrent": """
lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data
""",
}
"""The operators by category.

torch composes the operators of the last line of ``fp32``, and their gradients, of matrix products.
It calls ``pow_`` for ``square_``; the row of ``pow_`` would reject 16 bits.
"""

OPERATORS: Mapping[str, str] = {
    "norm": NORM,
    "interpolate": RESIZES,
    "softmin": "softmax.int",
    "grid_sample": "grid_sampler",
    "cross_entropy": "cross_entropy_loss",
    "nll_loss": "nll_loss_nd nll_loss nll_loss2d",
    "matrix_exp": "linalg_matrix_exp",
    "pinverse": PINVERSE,
    "det": "linalg_det",
    "lu_solve": "linalg_lu_solve",
    "slogdet": "linalg_slogdet",
    "__rpow__": "pow.Scalar pow.Tensor_Tensor",
}
"""The operators of functions that dispatch to none of their own name."""

FP16_RANGE = frozenset({"gelu"})
"""fp32 rows that only guard the range of fp16; bf16 has the range of fp32 and needs none (O4).

In bf16 such an operator and its gradient lose at most one rounding, and no ``torch.autocast``
runs it in fp32. ``benchmarks/op_errors.py`` measures both for every fp32 row.
"""

COVERED_INSIDE = ("conv1d.padding", "conv2d.padding", "conv3d.padding", "nll_loss_nd")
"""Operators that torch composes from other rows of the table.

Where a device lacks an autocast kernel for one of them, amp adds none: the inner rows give the same
result, and another kernel would only cost time. ``cross_entropy_loss`` is not among them: it
passes ``log_softmax`` its input's dtype, which the inner row would keep.
"""

SPARSE_OPERANDS = ("matmul", "mm", "addmm", "mv", "bmm")
"""Products that torch casts itself, but takes to 16 bits for which its sparse kernels are missing.

``linear`` is not among them: another kernel would cost 5 us in every linear layer.
"""

COMPARISONS = ("equal", "isclose", "allclose")
"""Rows that torch calls with numbers for tensors, to compare the constants of a trace."""

_WRITTEN = dict.fromkeys(("index_copy", "index_put", "scatter_add"), "promote")
_ON_MPS = {**_WRITTEN, "grid_sampler": "promote", "tensordot": "promote"}
_ON_ACCELERATORS: Mapping[str, str] = {
    **_ON_MPS,
    "binary_cross_entropy": "raises",
    "linalg_matrix_norm": "refuses",
    "linalg_matrix_norm.str_ord": "refuses",
}
_KEPT_ON_ACCELERATORS = """
binary_cross_entropy adaptive_max_pool3d max_pool3d max_unpool2d max_unpool3d reflection_pad1d
reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
fake_quantize_per_tensor_affine
"""

NATIVE_DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        **_WRITTEN,
        "cat": "promote",
        "stack": "promote",
        **dict.fromkeys(_KEPT_ON_ACCELERATORS.split(), "fp32"),
    },
    "cuda": _ON_ACCELERATORS,
    "xpu": _ON_ACCELERATORS,
    "mps": _ON_MPS,
}
"""Categories of torch's own autocast, by device type, where they differ from the table.

``raises``: on any input. ``refuses``: raises on 16-bit input, which its kernel does not cast.
torch's autocast kernels that are not listed here follow the table (torch 2.13), with one exception:
MPS has no 16-bit ``conv_transpose3d.input``, and torch runs it in fp32 from torch 2.9 on.

Some autocast kernels of the CPU have no row. torch promotes the arguments of ``cat`` and ``stack``
itself; its autocast does the same, but raises for the 16-bit dtype that is not its own. The other
kernels keep their input's dtype on every other device, and their results are exact in it.
"""
