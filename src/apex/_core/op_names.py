"""The functions that have rows in the op table, and the aten operators of each.

The names are those of apex's lists (``amp.lists``); newer functions of the same families are added.
"""

from __future__ import annotations

from collections.abc import Mapping

Names = Mapping[str, tuple[str, ...]]


def _same(names: str) -> dict[str, tuple[str, ...]]:
    """Returns the names as a map to the aten operator of the same name (default overload)."""
    return {name: (name,) for name in names.split()}


UNARY: Names = _same(
    "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan"
)

CONVOLUTIONS: Names = {
    "conv1d": ("conv1d", "conv1d.padding"),
    "conv2d": ("conv2d", "conv2d.padding"),
    "conv3d": ("conv3d", "conv3d.padding"),
    "conv_transpose1d": ("conv_transpose1d",),
    "conv_transpose2d": ("conv_transpose2d.input",),
    "conv_transpose3d": ("conv_transpose3d.input",),
    "conv_tbc": ("conv_tbc",),
}

PRODUCTS: Names = _same("prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm")

CELLS: Names = _same("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")

RECURRENT: Names = {
    name: (f"{name}.input", f"{name}.data") for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}

POW: Names = {"pow": ("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")}

_NORM: Names = {
    # torch.norm and Tensor.norm now call torch.linalg's norms; saved programs use the others.
    "norm": (
        *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
        *("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype"),
        *("nuclear_norm", "nuclear_norm.dim", "frobenius_norm.dim"),
    )
}

# torch composes these, their results and formulas of gradients included, of matrix products.
MATRICES: Names = {
    "matrix_exp": ("linalg_matrix_exp",),
    "pinverse": (
        *("linalg_pinv", "linalg_pinv.rcond_tensor"),
        *("linalg_pinv.atol_rtol_float", "linalg_pinv.atol_rtol_tensor"),
    ),
    **_same("cov corrcoef"),
}

REDUCTIONS: Names = {
    **_same("cumprod cumsum dist renorm logsumexp trace"),
    **_NORM,
    "prod": ("prod", "prod.dim_int"),
    "std": ("std", "std.dim", "std.correction"),
    "std_mean": ("std_mean", "std_mean.dim", "std_mean.correction"),
    "sum": ("sum", "sum.dim_IntList"),
    "var": ("var", "var.dim", "var.correction"),
    "var_mean": ("var_mean", "var_mean.dim", "var_mean.correction"),
}

_RESIZES = (
    *("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d"),
    *("_nearest_exact1d", "_nearest_exact2d", "_nearest_exact3d"),
    *("_bilinear2d_aa", "_bicubic2d_aa", "_lanczos2d_aa"),
)


def _resize(mode: str) -> tuple[str, str]:
    name = f"_upsample{mode}" if mode.startswith("_") else f"upsample_{mode}"
    return name, f"{name}.vec"


_SOFTMAX: Names = {"softmax": ("softmax.int",), "log_softmax": ("log_softmax.int",)}

FUNCTIONAL_FP32: Names = {
    **_same("softplus gelu layer_norm group_norm rms_norm cosine_similarity"),
    **_same("poisson_nll_loss cosine_embedding_loss hinge_embedding_loss kl_div l1_loss mse_loss"),
    **_same(
        "margin_ranking_loss multilabel_margin_loss multi_margin_loss smooth_l1_loss huber_loss"
    ),
    **_same("soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits"),
    **_SOFTMAX,
    "softmin": ("softmax.int",),
    "interpolate": tuple(op for mode in _RESIZES for op in _resize(mode)),
    "grid_sample": ("grid_sampler",),
    "cross_entropy": ("cross_entropy_loss",),
    "nll_loss": ("nll_loss_nd", "nll_loss", "nll_loss2d"),
    "ctc_loss": ("ctc_loss.IntList", "ctc_loss.Tensor"),
    # Python functions over other rows, which determine their result dtype.
    "local_response_norm": (),
    "multilabel_soft_margin_loss": (),
    "normalize": (),
}

TORCH_FP32: Names = _same("cdist pdist")

# No rows: torch itself promotes these, in-place ones to self's dtype.
_COMPARISONS = "eq ge gt le lt ne"
_ARITHMETIC = "add sub mul div"
_NATIVE_PROMOTION: Names = dict.fromkeys(f"{_ARITHMETIC} {_COMPARISONS}".split(), ())
_SEQUENCES: Names = dict.fromkeys(("cat", "stack"), ())
_PROMOTING_OPERATORS: Names = dict.fromkeys(
    [
        *(f"__{name}__" for name in _COMPARISONS.split()),
        *(f"__{i}{name}__" for name in [*_ARITHMETIC.split(), "truediv"] for i in ("", "r", "i")),
    ],
    (),
)

PROMOTE: Names = _same(
    "addcdiv addcmul atan2 cross bilinear dot vdot equal index_copy index_put scatter_add"
)

_METHODS_WITHOUT_BF16: Names = {
    **_same("cholesky cholesky_inverse cholesky_solve geqrf inverse orgqr ormqr qr svd"),
    **_same("triangular_solve"),
    "det": ("linalg_det",),
    "lu_solve": ("linalg_lu_solve",),
    **dict.fromkeys(("logdet", "slogdet"), ("linalg_slogdet",)),
    "quantile": ("quantile", "quantile.scalar"),
    "nanquantile": ("nanquantile", "nanquantile.scalar"),
    "stft": ("stft", "stft.center"),
}

_COMPLEX: Names = _same("complex polar view_as_complex")

_LINALG = (
    "cholesky cholesky_ex cond cond.p_str det eig eigh eigvals eigvalsh householder_product inv "
    "inv_ex ldl_factor ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve "
    "matrix_rank matrix_rank.tol_tensor matrix_rank.atol_rtol_float matrix_rank.atol_rtol_tensor "
    "matrix_sqrth qr slogdet solve solve_ex solve_triangular svd svdvals tensorinv tensorsolve"
)

_FOURIER = (
    "fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 irfftn rfft "
    "rfft2 rfftn"
)

WITHOUT_BF16: tuple[str, ...] = (
    *(op for names in (_METHODS_WITHOUT_BF16, _COMPLEX) for ops in names.values() for op in ops),
    *(f"linalg_{op}" for op in _LINALG.split()),
    *(f"fft_{op}" for op in _FOURIER.split()),
)
"""Operators of fp32 rows that have no kernel in bf16, and most none in fp16."""

_TORCH: Names = {
    **CONVOLUTIONS,
    **PRODUCTS,
    **_same("einsum tensordot convolution"),
    **CELLS,
    **RECURRENT,
    **UNARY,
    **POW,
    **REDUCTIONS,
    **MATRICES,
    **TORCH_FP32,
    **_METHODS_WITHOUT_BF16,
    **_COMPLEX,
    **_SOFTMAX,
    **PROMOTE,
    **_NATIVE_PROMOTION,
    **_SEQUENCES,
}

_METHODS: Names = {
    **PRODUCTS,
    "__matmul__": ("matmul",),
    "__rmatmul__": ("matmul",),
    **UNARY,
    **POW,
    "__pow__": POW["pow"],
    "__rpow__": ("pow.Scalar", "pow.Tensor_Tensor"),
    "__ipow__": ("pow_.Scalar", "pow_.Tensor"),
    "cpu": ("to.dtype_layout",),
    **{name: ops for name, ops in REDUCTIONS.items() if not name.endswith("_mean")},
    **MATRICES,
    **_METHODS_WITHOUT_BF16,
    **_SOFTMAX,
    **{name: ops for name, ops in PROMOTE.items() if name != "bilinear"},
    **_NATIVE_PROMOTION,
    **_PROMOTING_OPERATORS,
}

NAMES: Mapping[str, Names] = {
    "torch": _TORCH,
    "torch.nn.functional": {
        **CONVOLUTIONS,
        **_same("linear scaled_dot_product_attention prelu"),
        **FUNCTIONAL_FP32,
        **_same("bilinear binary_cross_entropy"),
    },
    "torch.Tensor": _METHODS,
}
"""The known names of every namespace, with the aten operators that each dispatches to.

For a name without operators, torch's own promotion (arithmetic, comparisons, ``cat``, ``stack``) or
other rows (Python functions) determine the result dtype; a row of its own could not change it.
"""
