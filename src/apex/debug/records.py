"""What was found about one operator, its casts, and one gradient, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from apex.debug.module_tracker import Direction

LOW = ("float16", "bfloat16")
"""Names of the 16-bit types."""


CAST = "aten._to_copy"
"""The operator under which casts stand that no other one consumed."""


@dataclass(frozen=True)
class CastCount:
    """Casts from one dtype to another, charged to one operator.

    Attributes:
        source: Dtype before.
        target: Dtype after.
        count: Casts made.
        bytes: Read and written.
        values: Numbers cast.
        to_zero: Of these, non-zero before and zero after.
        to_subnormal: Normal before and subnormal after.
        to_inf: Finite before and not after.
    """

    source: str
    target: str
    count: int
    bytes: int
    values: int
    to_zero: int = 0
    to_subnormal: int = 0
    to_inf: int = 0


@dataclass(frozen=True)
class OpRow:
    """One operator in one module and direction, with one set of dtypes.

    Attributes:
        module: Qualified name; ``""`` for the model itself and for code outside of it.
        inside: Whether the model ran it, and not the loss.
        direction: ``"forward"`` or ``"backward"``.
        op: Such as ``"aten.addmm"``; ``"aten._to_copy"`` for casts that no operator consumed.
        calls: How often it ran.
        dtypes_in: Floating dtypes that it computed with, after casts.
        dtype_out: Floating dtype of its first such result; ``""`` for none.
        casts: Casts that were made for it.
        seconds: In the operator and its casts.
        flops: Floating-point operations, by torch's formulas; 0 where there is none.
        values: Numbers in its floating results.
        largest: Largest finite absolute value among them.
        nonfinite: How many of them were inf or NaN.
        decided_by: What made it run in these dtypes.
    """

    module: str
    inside: bool
    direction: Direction
    op: str
    calls: int
    dtypes_in: tuple[str, ...]
    dtype_out: str
    casts: tuple[CastCount, ...]
    seconds: float
    flops: int
    values: int
    largest: float
    nonfinite: int
    decided_by: str

    @property
    def computed_in(self) -> str:
        """The dtype that it computed in; see :func:`computed_in`."""
        return computed_in(self.dtypes_in, self.dtype_out)

    @property
    def headroom(self) -> float | None:
        """Powers of two between the largest result and the greatest number of its dtype."""
        return headroom(self.largest, self.dtype_out)


@dataclass(frozen=True)
class RoundTrip:
    """Casts there and back again, which bring nothing but rounding.

    Attributes:
        module: Where the cast back was made.
        direction: ``"forward"`` or ``"backward"``.
        path: The dtypes, such as ``("bfloat16", "float32", "bfloat16")``.
        count: How often.
        casts: Casts that could be left out: two each time, one where the middle was also used.
        bytes: Read and written by these.
    """

    module: str
    direction: Direction
    path: tuple[str, str, str]
    count: int
    casts: int
    bytes: int


@dataclass(frozen=True)
class GradientRow:
    """A parameter's gradient at the present loss scale, held against fp16.

    Attributes:
        parameter: Qualified name.
        dtype: Of the gradient.
        values: Numbers in it.
        zeros: Exactly zero, which may have been flushed by an fp16 operator before.
        to_zero: Not zero, but zero in fp16.
        to_subnormal: Subnormal in fp16: kept with less than full precision.
        to_inf: Beyond fp16's range, or not finite at all.
    """

    parameter: str
    dtype: str
    values: int
    zeros: int
    to_zero: int
    to_subnormal: int
    to_inf: int


def computed_in(dtypes_in: tuple[str, ...], dtype_out: str) -> str:
    """Returns the dtype that an operator computed in, by those of its inputs and result.

    That of the result where an input has it too, for inputs beside the data (batch norm's
    statistics, attention's log-sum) may be wider; else the widest of the inputs.
    """
    if not dtypes_in or dtype_out in dtypes_in:
        return dtype_out
    return max(dtypes_in, key=lambda dtype: torch.finfo(getattr(torch, dtype)).bits)


def headroom(largest: float, dtype: str) -> float | None:
    """Returns the powers of two from ``largest`` to the greatest number of ``dtype``."""
    if not dtype or not largest > 0.0:
        return None
    return math.log2(torch.finfo(getattr(torch, dtype)).max) - math.log2(largest)
