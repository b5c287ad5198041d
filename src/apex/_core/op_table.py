"""Which operators run in low precision, fp32 or their widest input dtype, on every device.

Each row is an aten operator that ``torch.autocast`` sees; :mod:`.op_rows` has the data.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from apex._core import op_rows
from apex._core.op_rows import Category
from apex._torch import dispatcher

_NAMESPACES = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": Tensor}


def operators(namespace: str, name: str) -> tuple[str, ...]:
    """Returns the aten operators of a name of torch; none of a function that is Python.

    Raises:
        ValueError: If torch has no such function.
    """
    if name in op_rows.OPERATORS:
        return tuple(op_rows.OPERATORS[name].split())
    if not callable(getattr(_NAMESPACES[namespace], name, None)):
        raise ValueError(
            f"amp.lists cannot cast {namespace}.{name}: torch has no such function. Correct the "
            "name, or register a function of another module: amp.register_float_function(module, "
            "name)."
        )
    if namespace == "torch.nn.functional" and not dispatcher.is_builtin(name):
        return ()
    return dispatcher.overloads_of(_operator_of_method(name))


def _operator_of_method(name: str) -> str:
    """Returns the operator of a method such as ``__radd__``, or the name itself."""
    if not name.startswith("__"):
        return name
    operator = name.strip("_").replace("truediv", "div")
    plain = operator[1:]  # without the r of a reflected operator or the i of an in-place one
    if operator == "ipow" or plain in ("add", "sub", "mul", "div"):
        is_in_place = operator.startswith("i")
        return f"{plain}_" if is_in_place else plain
    return operator


@dataclass(frozen=True)
class OpTable:
    """The category of each aten operator of this torch; immutable, the same on every device.

    An operator without a row follows torch: its inner operators may have rows, and torch's own rule
    promotes mixed floating-point arguments (``add``, ``mul``, comparisons, ``cat``, ``stack``), by
    which a 0-d tensor does not widen the result. In ``promote`` rows, a 0-d tensor counts like any
    other, as in ``torch.autocast``. ``mean`` has no row and keeps low precision, as in apex.
    Factories have no rows. Of ``out=`` variants, only products have rows.

    Differences from apex's lists, and effects of other rows:

    - ``F.local_response_norm`` squares and averages in its input's dtype before the fp32 power;
      ``F.multilabel_soft_margin_loss`` computes log-sigmoids in it before the fp32 sum. Their
      results are fp32, as is the result of ``F.normalize``.
    - ``1 / x`` calls ``x.reciprocal()``, so it is fp32.
    - ``F.interpolate(mode="area")`` calls ``F.adaptive_avg_pool``, so it keeps its dtype.
    - ``x.cpu()`` keeps its dtype: write ``x.float().cpu().numpy()``.

    Attributes:
        rows: Category by aten operator and overload, such as ``{"pow.Scalar": "fp32"}``.
    """

    rows: Mapping[str, Category] = field(hash=False)

    @classmethod
    @functools.cache
    def default(cls) -> OpTable:
        """Returns the one table of apex's lists and newer operators."""
        rows: dict[str, Category] = {}
        for category, ops in op_rows.ROWS.items():
            for op in ops.split():
                if dispatcher.has_operator(f"aten::{op}"):
                    rows[op] = category
        return cls(rows)

    def for_dtype(self, dtype: torch.dtype) -> OpTable:
        """Returns the table without the rows that the region's dtype does not need."""
        if dtype is not torch.bfloat16:
            return self
        return OpTable({op: row for op, row in self.rows.items() if op not in op_rows.FP16_RANGE})

    def without(self, namespace: str, name: str) -> OpTable:
        """Returns the table without the rows of ``name``, whose operators then follow torch.

        A function and a method of the same name share their operators, so both lose their rows.
        Names that torch itself promotes (``add``, ``cat``) have no rows.
        """
        removed = operators(namespace, name)
        return OpTable({op: category for op, category in self.rows.items() if op not in removed})

    def without_bans(self) -> OpTable:
        """Returns the table with banned operators in fp32."""
        rows = self.rows.items()
        return OpTable({op: "fp32" if row == "banned" else row for op, row in rows})

    def with_(self, namespace: str, name: str, category: Category) -> OpTable:
        """Returns the table with the operators of ``name`` in ``category``.

        In-place operators cannot change the dtype of the tensor that they write: in fp32 rows, they
        refuse 16-bit tensors.
        """
        into_self: Category = "fp32_inplace" if category == "fp32" else "destination"
        rows = dict(self.rows)
        for op in operators(namespace, name):
            operator, _, _ = op.partition(".")
            rows[op] = into_self if operator.endswith("_") else category
        return OpTable(rows)


@dataclass(frozen=True)
class AutocastSpec:
    """The op casts of one session.

    Attributes:
        dtype: The low precision, float16 (O1) or bfloat16 (O4).
        device_types: Device types of the prepared models, such as ``("cpu",)``.
        table: The op table, with the user's changes.
    """

    dtype: torch.dtype
    device_types: tuple[str, ...]
    table: OpTable

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the rows."""
        rules = repr(sorted(self.table.rows.items()))
        return hashlib.sha256(rules.encode()).hexdigest()[:16]
