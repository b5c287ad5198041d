"""Records of one operator, its casts, and one gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from apex.debug.module_tracker import Direction

LOW = ("float16", "bfloat16")
"""Names of the 16-bit dtypes."""

CAST = "aten._to_copy"
"""The operator that lists casts whose result no other operator consumed."""

OF_FORWARD = "dtypes of the forward"
"""What decides the dtype of an operator of the backward pass."""


@dataclass(frozen=True)
class CastCount:
    """Casts from one dtype to another that are charged to one operator.

    Attributes:
        source: Dtype before the cast.
        target: Dtype after the cast.
        count: Number of casts.
        bytes: Bytes read and written.
        values: Number of elements cast.
        to_zero: Elements that were non-zero before and zero after.
        to_subnormal: Elements that were normal before and subnormal after.
        to_inf: Elements that were finite before and infinite after.
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

    Without calls, it identifies the record of an operator that is running.

    Attributes:
        module: Qualified name; ``""`` for the model itself and for code outside it.
        inside: Whether the model ran the operator, rather than the loss.
        direction: ``"forward"`` or ``"backward"``.
        op: Name such as ``"aten.addmm"``; ``"aten._to_copy"`` for casts that no operator consumed.
        dtypes_in: Floating-point dtypes of its inputs, after casts.
        dtype_out: Dtype of its first floating-point result; ``""`` without one.
        decided_by: What decided these dtypes.
        calls: Number of calls.
        casts: Casts made for it.
        seconds: Time in the operator and its casts.
        flops: Floating-point operations by torch's formulas; 0 without a formula.
        values: Number of elements in its floating-point results.
        largest: Largest finite absolute value among these.
        nonfinite: Number of inf and NaN among these.
    """

    module: str
    inside: bool
    direction: Direction
    op: str
    dtypes_in: tuple[str, ...]
    dtype_out: str
    decided_by: str = ""
    calls: int = 0
    casts: tuple[CastCount, ...] = ()
    seconds: float = 0.0
    flops: int = 0
    values: int = 0
    largest: float = 0.0
    nonfinite: int = 0

    @property
    def computed_in(self) -> str:
        """The dtype in which the operator computed, derived from its inputs and result.

        This is the dtype of the result if an input has it too, because auxiliary inputs (batch
        norm's statistics, attention's log-sum) may be wider; otherwise the widest dtype of the
        inputs.
        """
        if not self.dtypes_in or self.dtype_out in self.dtypes_in:
            return self.dtype_out
        return max(self.dtypes_in, key=lambda dtype: torch.finfo(getattr(torch, dtype)).bits)

    @property
    def headroom(self) -> float | None:
        """Headroom: powers of two from the largest result to the largest number of its dtype."""
        if not self.dtype_out or not self.largest > 0.0:
            return None
        return math.log2(torch.finfo(getattr(torch, self.dtype_out)).max) - math.log2(self.largest)


@dataclass(frozen=True)
class RoundTrip:
    """Round trips from one dtype to another and back: redundant, or through one operator.

    Attributes:
        module: Module that made the cast back; of a round trip through an operator, its module.
        direction: ``"forward"`` or ``"backward"``.
        path: The dtypes, such as ``("bfloat16", "float32", "bfloat16")``.
        count: Number of round trips.
        casts: Avoidable casts: two per round trip, or one if the intermediate value was also used.
            An operator may take several inputs that are cast.
        bytes: Bytes that these casts read and wrote.
        op: The operator that computed in the wider dtype; ``""`` if the second cast undoes the
            first, so that both are redundant.
        decided_by: What decided the operator's dtype.
        seconds: Time that these casts took.
    """

    module: str
    direction: Direction
    path: tuple[str, str, str]
    count: int
    casts: int
    bytes: int
    op: str = ""
    decided_by: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class WeightCasts:
    """Casts of parameters to one 16-bit dtype.

    Attributes:
        target: Dtype after the cast.
        count: Number of casts.
        bytes: Bytes that these casts read and wrote.
        seconds: Time that they took.
        modules: Modules in which they are made.
    """

    target: str
    count: int
    bytes: int
    seconds: float
    modules: tuple[str, ...]


@dataclass(frozen=True)
class GradientRow:
    """A parameter's gradient at the current loss scale, compared with fp16's range.

    Attributes:
        parameter: Qualified name.
        dtype: Dtype of the gradient.
        values: Number of elements.
        zeros: Elements that are exactly zero; an earlier fp16 operator may have flushed them.
        to_zero: Non-zero elements that would be zero in fp16.
        to_subnormal: Elements that would be subnormal in fp16, with reduced precision.
        to_inf: Elements beyond fp16's range or already non-finite.
    """

    parameter: str
    dtype: str
    values: int
    zeros: int
    to_zero: int
    to_subnormal: int
    to_inf: int


def share(part: float, whole: float) -> float | None:
    """Returns ``part / whole``; None if the whole is 0."""
    return part / whole if whole else None
