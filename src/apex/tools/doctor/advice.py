"""The level that suits a machine."""

from __future__ import annotations

from dataclasses import dataclass

from apex.tools.doctor.speeds import Speed, ratio

LEAST_GAIN = 1.2
"""Least speed-up over fp32 in single operators that still pays off in a whole model."""

MUCH_FASTER = 1.5
"""Speed of fp16 relative to bf16 that justifies loss scaling."""


@dataclass(frozen=True)
class Advice:
    """A level and the reason for it.

    Attributes:
        opt_level: Such as ``"O4"``.
        reason: One sentence with measurements.
    """

    opt_level: str
    reason: str


def advise(speeds: list[Speed], device: str) -> Advice:
    """Returns the level to start with on ``device``.

    Args:
        speeds: The result of :func:`apex.tools.doctor.speeds.measure` for it.
        device: The device.
    """
    bf16, fp16 = (ratio(speeds, device, name) for name in ("bfloat16", "float16"))
    if fp16 >= LEAST_GAIN and fp16 > bf16 * MUCH_FASTER:
        return Advice(
            "O1",
            f"fp16 is {fp16:.1f} times as fast as fp32 on {device} and bf16 only {bf16:.1f} times; "
            "O1 casts by operator and scales the loss. O2 stores the model in fp16, too.",
        )
    if bf16 >= LEAST_GAIN:
        return Advice(
            "O4",
            f"bf16 is {bf16:.1f} times as fast as fp32 on {device} and needs no loss scaling; O4 "
            "casts by operator. O5 stores the model in bf16, too.",
        )
    return Advice(
        "O0",
        f"stay in fp32, because bf16 is {bf16:.1f} times and fp16 {fp16:.1f} times as fast on "
        f"{device}, too little to benefit. O5 still halves the bytes of weights and gradients "
        "sent between processes.",
    )
