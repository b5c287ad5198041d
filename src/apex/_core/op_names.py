"""The functions that have rows in the op table, and the aten operators of each.

The names are those of apex's lists (``amp.lists``); newer functions of the same families are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from apex._torch import dispatcher

Names = Mapping[str, tuple[str, ...]]


def _same(names: str) -> dict[str, tuple[str, ...]]:
    """Returns the names as a map to the aten operator of the same name (default overload)."""
    return {name: (name,) for name in names.split()}


def in_place(op: str) -> str:
    """Returns the in-place operator of another, such as ``"pow_.Scalar"``."""
    name, dot, overload = op.partition(".")
    return f"{name}_{dot}{overload}"


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

PROMOTE: Names = {
    **_same("addcdiv addcmul atan2 cross bilinear dot vdot equal"),
    "lerp": ("lerp.Scalar", "lerp.Tensor"),
}

# They write one tensor into another, which torch wants of the same dtype.
WRITES: Names = {
    **_same("index_add index_copy index_put index_reduce masked_scatter put scatter_add"),
    "scatter": ("scatter.src", "scatter.reduce"),
    "scatter_reduce": ("scatter_reduce.two",),
}

IN_PLACE_WRITES: Names = {
    **{f"{name}_": tuple(map(in_place, ops)) for name, ops in WRITES.items()},
    "lerp_": ("lerp_.Scalar", "lerp_.Tensor"),
}

QUANTIZATION: Names = _same("fused_moving_avg_obs_fake_quant")

SPARSE: Names = {
    **_same("smm hspmm sspaddmm"),
    "_sparse_mm": ("_sparse_mm", "_sparse_mm.reduce"),
    "_sparse_addmm": ("_sparse_addmm",),
    "sparse_sampled_addmm": ("sparse_sampled_addmm",),
}
"""Products of which an operand is always sparse."""

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
    **WRITES,
    **QUANTIZATION,
    **SPARSE,
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
    "cpu": (),
    **{name: ops for name, ops in REDUCTIONS.items() if not name.endswith("_mean")},
    **MATRICES,
    **_METHODS_WITHOUT_BF16,
    **_SOFTMAX,
    **{name: ops for name, ops in PROMOTE.items() if name != "bilinear"},
    **WRITES,
    **IN_PLACE_WRITES,
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
"""The names with rows, and those of apex's lists, with the aten operators that each dispatches to.

For a name without operators, torch's own promotion (arithmetic, comparisons, ``cat``, ``stack``) or
other rows (Python functions) determine the result dtype.
"""


def operators(namespace: str, name: str) -> tuple[str, ...]:
    """Returns the aten operators of a name of torch; none of a function that is Python.

    Raises:
        ValueError: If torch has no such function.
    """
    if namespace not in NAMES:
        raise ValueError(
            f"Unknown namespace {namespace!r} of amp.lists: use one of {', '.join(NAMES)}."
        )
    known = NAMES[namespace].get(name)
    if known:
        return known
    holder: Any = {"torch": torch, "torch.Tensor": torch.Tensor}.get(namespace, torch.nn.functional)
    if known is None and not callable(getattr(holder, name, None)):
        raise ValueError(
            f"amp.lists cannot cast {namespace}.{name}: torch has no such function. Correct the "
            "name, or register a function of another module: amp.register_float_function(module, "
            "name)."
        )
    if namespace == "torch.nn.functional" and not dispatcher.is_builtin(name):
        return ()
    return dispatcher.overloads_of(_plain(name))


def _plain(name: str) -> str:
    """Returns the operator of a method such as ``__radd__``, or the name itself."""
    if not name.startswith("__"):
        return name
    own = name.strip("_")
    if own.startswith("i") and own[1:] in _ARITHMETIC_METHODS:
        return f"{_ARITHMETIC_METHODS[own[1:]]}_"
    own = own[1:] if own.startswith("r") and own[1:] in _ARITHMETIC_METHODS else own
    return _ARITHMETIC_METHODS.get(own, own)


_ARITHMETIC_METHODS = {**{name: name for name in _ARITHMETIC.split()}, "truediv": "div"}
