"""Which operators run in low precision, fp32 or their widest input dtype, on every device.

Each row is an aten operator that ``torch.autocast`` sees; :mod:`.op_names` has their functions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from apex._core import op_names
from apex._core.op_names import NAMES, Names

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

``low_precision``: all to the region's dtype; float64 is kept, and sparse operands go to fp32.
``fp32``: fp16 and bf16 to fp32; float64 and a ``dtype=`` argument are kept.
``promote``: all to the widest floating-point dtype among them.
``banned``: as ``fp32``, but fp16 raises NotImplementedError unless the spec allows it.
``destination``: all to the dtype of the tensor that is written to: ``self``, or ``out``.
``fp32_inplace``: none; a low-precision ``self``, which cannot hold an fp32 result, raises
NotImplementedError (``x **= 2`` makes a new fp32 tensor).
``recurrent``: input, state and weights of a whole RNN to the region's dtype.
"""

# torch calls ``pow_`` for the last, whose row would refuse 16 bits.
_INTO_SELF = (
    *("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_", "square_"),
    *(f"{product}.out" for product in op_names.PRODUCTS if product != "prelu"),
)

_INPLACE_FP32 = (
    *(f"{name}_" for name in op_names.UNARY),
    *("pow_.Scalar", "pow_.Tensor", "cumprod_", "cumsum_", "renorm_"),
)

FP16_RANGE: frozenset[str] = frozenset({"gelu"})
"""fp32 rows that only guard the range of fp16; bf16, which has that of fp32, needs none (O4).

In bf16 such an operator and its gradient lose one rounding and no more, and no ``torch.autocast``
runs it in fp32. ``tests/support/reference/op_errors.py`` measures both for every fp32 row.
"""

COVERED_INSIDE: frozenset[str] = frozenset(
    {"conv1d.padding", "conv2d.padding", "conv3d.padding", "nll_loss_nd"}
)
"""Operators that torch composes from other rows of the table.

Where a device lacks an autocast kernel for one of them, amp adds none: the inner rows give the same
result, and another kernel would only cost time. ``cross_entropy_loss`` is not among them: it
passes ``log_softmax`` its input's dtype, which the inner row would keep.
"""

SPARSE_OPERANDS: frozenset[str] = frozenset({"matmul", "mm", "addmm", "mv", "bmm"})
"""Products that torch casts itself, but takes to 16 bits for which its sparse kernels are missing.

``linear`` is not among them: another kernel would cost 5 us in every linear layer.
"""

_WRITES = dict.fromkeys(("index_copy", "index_put", "scatter_add"), "promote")
_NATIVE_ON_ACCELERATORS: Mapping[str, str] = {
    **_WRITES,
    "binary_cross_entropy": "raises",
    "grid_sampler": "promote",
    "tensordot": "promote",
    "linalg_matrix_norm": "refuses",
    "linalg_matrix_norm.str_ord": "refuses",
}
_NATIVE_ON_CPU: Mapping[str, str] = {
    **_WRITES,
    "binary_cross_entropy": "fp32",
    **dict.fromkeys(("cat", "stack"), "promote"),
    **dict.fromkeys(
        (
            *("adaptive_max_pool3d", "max_pool3d", "max_unpool2d", "max_unpool3d"),
            *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
            *("replication_pad3d", "fake_quantize_per_tensor_affine"),
        ),
        "fp32",
    ),
}

NATIVE_DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "cpu": _NATIVE_ON_CPU,
    "cuda": _NATIVE_ON_ACCELERATORS,
    "xpu": _NATIVE_ON_ACCELERATORS,
    "mps": {**_WRITES, "grid_sampler": "promote", "tensordot": "promote"},
}
"""Categories of torch's own autocast, by device type, where they differ from the table.

``raises``: on any input. ``refuses``: raises on 16-bit input, which its kernel does not cast.
torch's autocast kernels that are not listed here follow the table (torch 2.13).

Some of the CPU's have no row. torch promotes the arguments of ``cat`` and ``stack`` itself; its
autocast does the same, but raises for the 16-bit dtype that is not its own. The others keep their
input's dtype on every other device; what they compute is exact in it.
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
    Factories have no rows, nor have ``out=`` variants other than those of products.

    Differences from apex's lists, and effects of other rows:

    - ``F.local_response_norm`` squares and averages in its input's dtype before the fp32 power;
      ``F.multilabel_soft_margin_loss`` computes log-sigmoids in it before the fp32 sum. Their
      results, and that of ``F.normalize``, are fp32.
    - ``1 / x`` calls ``x.reciprocal()``, so it is fp32.
    - ``F.interpolate(mode="area")`` calls ``F.adaptive_avg_pool``, so it keeps its dtype.
    - ``x.cpu()`` keeps its dtype: write ``x.float().cpu().numpy()``.

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
            op_names.CONVOLUTIONS,
            op_names.PRODUCTS,
            op_names.CELLS,
            ("linear", "einsum", "tensordot", "scaled_dot_product_attention", "convolution"),
            ("linalg_multi_dot", "linalg_vecdot"),
        )
        fp32 = _ops(
            op_names.UNARY,
            op_names.POW,
            op_names.REDUCTIONS,
            op_names.MATRICES,
            op_names.FUNCTIONAL_FP32,
            op_names.TORCH_FP32,
            op_names.WITHOUT_BF16,
            op_names.QUANTIZATION,
            op_names.SPARSE,
        )
        groups: dict[Category, Iterable[str]] = {
            "low_precision": low,
            "fp32": fp32,
            "promote": _ops(op_names.PROMOTE),
            "banned": functional["binary_cross_entropy"],
            "destination": _ops(_INTO_SELF, op_names.WRITES, op_names.IN_PLACE_WRITES),
            "fp32_inplace": _INPLACE_FP32,
            "recurrent": _ops(op_names.RECURRENT),
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
        """
        removed = op_names.operators(namespace, name)
        return OpTable({op: category for op, category in self.rows.items() if op not in removed})

    def with_(self, namespace: str, name: str, category: Category) -> OpTable:
        """Returns the table with the operators of ``name`` in ``category``.

        In-place operators keep the dtype of what they write: in fp32 rows, they refuse 16 bits.

        Raises:
            ValueError: If the name has no operators, or the category is unknown.
        """
        if category not in get_args(Category):
            raise ValueError(
                f"Unknown op category {category!r}: use one of {', '.join(get_args(Category))}."
            )
        ops = op_names.operators(namespace, name)
        if not ops:
            raise ValueError(
                f"amp.lists cannot make {namespace}.{name} {category}: it has no operator of its "
                f"own. Register it: amp.register_float_function({namespace}, {name!r}), "
                "amp.register_half_function or amp.register_promote_function."
            )
        into_self: Category = "fp32_inplace" if category == "fp32" else "destination"
        rows = {op: into_self if _is_in_place(op) else category for op in ops}
        return OpTable({**self.rows, **rows})


def _is_in_place(op: str) -> bool:
    return op.partition(".")[0].endswith("_")


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
