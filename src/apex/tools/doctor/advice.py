"""The level that suits a machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from apex.tools.doctor.speeds import Speed, ratio
from apex.tools.load import Load, why_times_spread
from apex.tools.paired import Interval

LEAST_GAIN = 1.2
"""Least speed-up over fp32 in single operators that still pays off in a whole model."""

MUCH_FASTER = 1.5
"""Speed of fp16 relative to bf16 that justifies loss scaling."""


@dataclass(frozen=True)
class Advice:
    """A level and the reason for it.

    Attributes:
        opt_level: Such as ``"O4"``; ``None`` if the measurements do not decide.
        reason: One sentence with measurements.
    """

    opt_level: str | None
    reason: str

    def __str__(self) -> str:
        start = "No level suggested" if self.opt_level is None else f"Start with {self.opt_level}"
        return f"{start}: {self.reason}"


def advise(speeds: list[Speed], device: str, load: Load | None = None) -> Advice:
    """Returns the level to start with on ``device``, or none if the speeds spread too widely."""
    bf16, fp16 = (ratio(speeds, device, name) for name in ("bfloat16", "float16"))
    corners = itertools.product(
        (fp16.low, fp16.median, fp16.high), (bf16.low, bf16.median, bf16.high)
    )
    levels = {_level(*corner) for corner in corners}
    if len(levels) > 1:
        return Advice(
            None,
            f"{why_times_spread(load)}. Relative to fp32 on {device}, bf16 measured {_range(bf16)} "
            f"and fp16 {_range(fp16)}. Run again when it is idle, or with a larger --seconds.",
        )
    if levels == {"O1"}:
        return Advice(
            "O1",
            f"fp16 is {fp16.median:.2g} times as fast as fp32 on {device} and bf16 only "
            f"{bf16.median:.2g} times; O1 casts by operator and scales the loss. O2 stores the "
            "model in fp16, too.",
        )
    if levels == {"O4"}:
        return Advice(
            "O4",
            f"bf16 is {bf16.median:.2g} times as fast as fp32 on {device} and needs no loss "
            "scaling; O4 casts by operator. O5 stores the model in bf16, too.",
        )
    return Advice(
        "O0",
        f"stay in fp32, because bf16 is {bf16.median:.2g} times and fp16 {fp16.median:.2g} times "
        f"as fast on {device}, too little to benefit. O5 still halves the bytes of weights and "
        "gradients sent between processes.",
    )


def _level(fp16: float, bf16: float) -> str:
    """Returns the simplest level that is fast at these speeds relative to fp32."""
    if fp16 >= LEAST_GAIN and fp16 > bf16 * MUCH_FASTER:
        return "O1"
    return "O4" if bf16 >= LEAST_GAIN else "O0"


def _range(speed: Interval) -> str:
    return f"{speed.low:.2g} to {speed.high:.2g} times as fast"
