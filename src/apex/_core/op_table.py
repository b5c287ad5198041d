"""Which operators run in low precision, fp32 or their widest input dtype, on every device.

Maps the names in apex's lists (``amp.lists``) to the aten operators that ``torch.autocast`` sees.
Newer operators of the same families are added.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

Category = Literal[
    "low_precision",
    "fp32",
    "promote",
    "banned",
    "low_precision_inplace",
    "fp32_inplace",
    "recurrent",
    "to_cpu",
]
"""How a row casts an operator's arguments.

``low_precision``: all to the region's dtype; float64 only inside prepared forwards and
``torch.autocast`` blocks.
``fp32``: fp16 and bf16 to fp32; float64 and a ``dtype=`` argument are kept.
``promote``: all to the widest floating-point dtype among them.
``banned``: as ``fp32``, but fp16 raises NotImplementedError unless the spec allows it.
``low_precision_inplace``: all to the dtype of ``self``, which receives the result.
``fp32_inplace``: none; a low-precision ``self``, which cannot hold an fp32 result, raises
NotImplementedError (``x **= 2`` makes a new fp32 tensor).
``recurrent``: input, state and weights of a whole RNN to the region's dtype.
``to_cpu``: none, but ``Tensor.cpu()`` of a low-precision tensor returns fp32.
"""

Names = Mapping[str, tuple[str, ...]]


def _same(names: str) -> dict[str, tuple[str, ...]]:
    """Returns the names as a map to the aten operator of the same name (default overload)."""
    return {name: (name,) for name in names.split()}


_UNARY = "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan"

_CONVOLUTIONS: Names = {
    "conv1d": ("conv1d", "conv1d.padding"),
    "conv2d": ("conv2d", "conv2d.padding"),
    "conv3d": ("conv3d", "conv3d.padding"),
    "conv_transpose1d": ("conv_transpose1d",),
    "conv_transpose2d": ("conv_transpose2d.input",),
    "conv_transpose3d": ("conv_transpose3d.input",),
    "conv_tbc": ("conv_tbc",),
}

_PRODUCTS: Names = _same("prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm")

_CELLS: Names = _same("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")

_RECURRENT: Names = {
    name: (f"{name}.input", f"{name}.data") for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}

_POW: Names = {"pow": ("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")}

_NORM: Names = {
    # torch.norm and Tensor.norm now call torch.linalg's norms; saved programs use the others.
    "norm": (
        *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
        *("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype"),
        *("nuclear_norm", "nuclear_norm.dim", "frobenius_norm.dim"),
    )
}

# torch composes these, their results and formulas of gradients included, of matrix products.
_MATRICES: Names = {
    "matrix_exp": ("linalg_matrix_exp",),
    "pinverse": (
        *("linalg_pinv", "linalg_pinv.rcond_tensor"),
        *("linalg_pinv.atol_rtol_float", "linalg_pinv.atol_rtol_tensor"),
    ),
    **_same("cov corrcoef"),
}

_REDUCTIONS: Names = {
    **_same("cumprod cumsum dist renorm logsumexp"),
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

_FUNCTIONAL_FP32: Names = {
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

_PROMOTE: Names = _same("addcdiv addcmul atan2 cross bilinear dot vdot equal")

_TORCH: Names = {
    **_CONVOLUTIONS,
    **_PRODUCTS,
    **_same("einsum tensordot"),
    **_CELLS,
    **_RECURRENT,
    **_same(_UNARY),
    **_POW,
    **_REDUCTIONS,
    **_MATRICES,
    **_SOFTMAX,
    **_PROMOTE,
    **_NATIVE_PROMOTION,
    **_SEQUENCES,
}

_METHODS: Names = {
    **_PRODUCTS,
    "__matmul__": ("matmul",),
    "__rmatmul__": ("matmul",),
    **_same(_UNARY),
    **_POW,
    "__pow__": _POW["pow"],
    "__rpow__": ("pow.Scalar", "pow.Tensor_Tensor"),
    "__ipow__": ("pow_.Scalar", "pow_.Tensor"),
    "cpu": ("to.dtype_layout",),
    **{name: ops for name, ops in _REDUCTIONS.items() if not name.endswith("_mean")},
    **_MATRICES,
    **_SOFTMAX,
    **_same("addcdiv addcmul atan2 cross dot vdot equal"),
    **_NATIVE_PROMOTION,
    **_PROMOTING_OPERATORS,
}

NAMES: Mapping[str, Names] = {
    "torch": _TORCH,
    "torch.nn.functional": {
        **_CONVOLUTIONS,
        **_same("linear scaled_dot_product_attention prelu"),
        **_FUNCTIONAL_FP32,
        **_same("bilinear binary_cross_entropy"),
    },
    "torch.Tensor": _METHODS,
}
"""The known names of every namespace, with the aten operators that each dispatches to.

For a name without operators, torch's own promotion (arithmetic, comparisons, ``cat``, ``stack``) or
other rows (Python functions) determine the result dtype; a row of its own could not change it.
"""

# torch calls ``pow_`` for the last, whose row would refuse 16 bits.
_INPLACE_LOW = ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_", "square_")

_INPLACE_FP32 = (
    *(f"{name}_" for name in _UNARY.split()),
    *("pow_.Scalar", "pow_.Tensor", "cumprod_", "cumsum_", "renorm_"),
)

FP16_RANGE: frozenset[str] = frozenset({"gelu"})
"""fp32 rows that only guard the range of fp16; bf16, which has that of fp32, needs none (O4).

In bf16 such an operator and its gradient lose one rounding and no more, and no ``torch.autocast``
runs it in fp32. ``tests/reference/op_errors.py`` measures both for every fp32 row.
"""

COVERED_INSIDE: frozenset[str] = frozenset(
    {"conv1d.padding", "conv2d.padding", "conv3d.padding", "nll_loss_nd"}
)
"""Operators that torch composes from other rows of the table.

Where a device lacks an autocast kernel for one of them, amp adds none: the inner rows give the same
result, and another kernel would only cost time. ``cross_entropy_loss`` is not among them: it
passes ``log_softmax`` its input's dtype, which the inner row would keep.
"""

_NATIVE_ON_ACCELERATORS: Mapping[str, str] = {
    "binary_cross_entropy": "banned",
    "grid_sampler": "promote",
    "tensordot": "promote",
    "linalg_matrix_norm": "refuses",
    "linalg_matrix_norm.str_ord": "refuses",
}

NATIVE_DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "cpu": {"binary_cross_entropy": "fp32"},
    "cuda": _NATIVE_ON_ACCELERATORS,
    "xpu": _NATIVE_ON_ACCELERATORS,
    "mps": {"grid_sampler": "promote", "tensordot": "promote"},
}
"""Categories of torch's own autocast, by device type, where they differ from the table.

``refuses``: raises on 16-bit input, which its kernel does not cast. torch's autocast kernels that
are not listed here follow the table (torch 2.13).
"""

PASSED_ON: Mapping[str, tuple[str, ...]] = {"cpu": ("cat", "stack")}
"""Operators without a row that torch's own autocast casts, by device type.

torch promotes their arguments itself; its autocast does the same, but raises for the 16-bit dtype
that is not its own ("Unexpected floating ScalarType in at::autocast::prioritize").
"""

DEVICE_LIMITS: Mapping[str, Mapping[str, Category]] = {"mps": {"conv_transpose3d.input": "fp32"}}
"""Rows that a device has no 16-bit kernel for, by device type, and what runs there instead.

torch's own autocast does the same from torch 2.9 on.
"""


def _ops(*groups: Names | Iterable[str]) -> list[str]:
    """Returns the operators of the groups in order."""
    found: list[str] = []
    for group in groups:
        if isinstance(group, Mapping):
            found.extend(op for ops in group.values() for op in ops)
        else:
            found.extend(group)
    return found


@dataclass(frozen=True)
class OpTable:
    """The category of each aten operator; immutable, and the same on every device.

    An operator without a row follows torch: its inner operators may have rows, and torch's own rule
    promotes mixed floating-point arguments (``add``, ``mul``, comparisons, ``cat``, ``stack``), by
    which a 0-d tensor does not widen the result. In ``promote`` rows, a 0-d tensor counts like any
    other, as in ``torch.autocast``. ``mean`` has no row and keeps low precision, as in apex.
    Factories and ``out=`` variants have no rows.

    Differences from apex's lists, and effects of other rows:

    - ``F.local_response_norm`` squares and averages in its input's dtype before the fp32 power;
      ``F.multilabel_soft_margin_loss`` computes log-sigmoids in it before the fp32 sum. Their
      results, and that of ``F.normalize``, are fp32.
    - ``1 / x`` calls ``x.reciprocal()``, so it is fp32.
    - ``F.interpolate(mode="area")`` calls ``F.adaptive_avg_pool``, so it keeps its dtype.
    - ``x.to("cpu")``, and ``x.type_as(y)`` on the CPU, dispatch as ``x.cpu()`` and return fp32,
      except with a dtype, ``non_blocking`` or ``copy``.

    Attributes:
        rows: Category by aten operator and overload, such as ``{"pow.Scalar": "fp32"}``.
    """

    rows: Mapping[str, Category] = field(hash=False)

    def __hash__(self) -> int:
        return hash(frozenset(self.rows.items()))

    @classmethod
    @functools.cache
    def default(cls) -> OpTable:
        """Returns the one table of apex's lists and newer operators."""
        functional = NAMES["torch.nn.functional"]
        low = _ops(
            _CONVOLUTIONS,
            _PRODUCTS,
            _CELLS,
            ("linear", "einsum", "tensordot", "scaled_dot_product_attention"),
        )
        fp32 = _ops(_same(_UNARY), _POW, _REDUCTIONS, _MATRICES, _FUNCTIONAL_FP32)
        groups: dict[Category, Iterable[str]] = {
            "low_precision": low,
            "fp32": fp32,
            "promote": _ops(_PROMOTE),
            "banned": functional["binary_cross_entropy"],
            "low_precision_inplace": _INPLACE_LOW,
            "fp32_inplace": _INPLACE_FP32,
            "recurrent": _ops(_RECURRENT),
            "to_cpu": _METHODS["cpu"],
        }
        return cls({op: category for category, ops in groups.items() for op in ops})

    def for_dtype(self, dtype: torch.dtype) -> OpTable:
        """Returns the table without the rows that the region's dtype does not need."""
        if dtype is not torch.bfloat16:
            return self
        return OpTable({op: row for op, row in self.rows.items() if op not in FP16_RANGE})

    def without(self, namespace: str, name: str) -> OpTable:
        """Returns the table without the rows of ``name``, whose operators then follow torch.

        A function and a method of the same name share their operators, so both lose their rows.
        Names that torch itself promotes (``add``, ``cat``) have no rows.

        Raises:
            ValueError: If the name is unknown.
        """
        removed = _operators_of(namespace, name)
        return OpTable({op: category for op, category in self.rows.items() if op not in removed})

    def with_(self, namespace: str, name: str, category: Category) -> OpTable:
        """Returns the table with the operators of ``name`` in ``category``.

        Raises:
            ValueError: If the name or the category is unknown, or no row can change the name.
        """
        if category not in get_args(Category):
            raise ValueError(
                f"Unknown op category {category!r}: use one of {', '.join(get_args(Category))}."
            )
        ops = _operators_of(namespace, name)
        if not ops and category != _inherent_category(name):
            raise ValueError(
                f"amp.lists cannot make {namespace}.{name} {category}: torch or its inner "
                f"operators determine its dtype ({_inherent_category(name)}). "
                f"{_register_instead(namespace, name)}"
            )
        return OpTable({**self.rows, **dict.fromkeys(ops, category)})


def _operators_of(namespace: str, name: str) -> tuple[str, ...]:
    """Returns the operators of a name; raises ValueError if it is unknown."""
    if namespace not in NAMES:
        raise ValueError(
            f"Unknown namespace {namespace!r} of amp.lists: use one of {', '.join(NAMES)}."
        )
    if name not in NAMES[namespace]:
        raise ValueError(
            f"amp.lists cannot cast {namespace}.{name}: it is not among the "
            f"{len(NAMES[namespace])} names of {namespace} that amp knows. "
            f"{_register_instead(namespace, name)}"
        )
    return NAMES[namespace][name]


def _inherent_category(name: str) -> Category:
    """Returns the category that a name without operators has in effect."""
    return "fp32" if name in _FUNCTIONAL_FP32 else "promote"


def _register_instead(namespace: str, name: str) -> str:
    return (
        "Before amp.initialize, register it instead: amp.register_half_function"
        f"({namespace}, {name!r}), amp.register_float_function or amp.register_promote_function."
    )


@dataclass(frozen=True)
class CastSpec:
    """The op casts of one session.

    Attributes:
        dtype: The low precision, float16 (O1) or bfloat16 (O4).
        device_types: Device types of the prepared models, such as ``("cpu",)``.
        table: The op table, with the user's changes.
        allow_banned: Whether banned operators run in fp32 on fp16 input instead of raising.
    """

    dtype: torch.dtype
    device_types: tuple[str, ...]
    table: OpTable
    allow_banned: bool = False
