"""Memory that a variant needs, relative to fp32 and in words."""

from __future__ import annotations

from apex.tools.results import Result

LEAST_MEMORY_GAIN = 0.9
"""Largest share of fp32's memory that counts as less."""

LEAST_BYTES_MENTIONED = 1e6
"""Savings below this do not count as less memory, whatever their share."""


def needed(result: Result) -> int:
    """Returns the peak bytes, or, where they are not measured, those that are known.

    These are the bytes stored between steps and those saved for backward; 0 if neither is known.
    """
    if result.training is None or result.probe is None:
        return 0
    if result.training.peak_bytes is not None:
        return result.training.peak_bytes
    stored = result.training.stored
    return stored.model + stored.masters + stored.optimizer + result.probe.activation_bytes


def has_peak(result: Result) -> bool:
    """Returns whether the peak was measured."""
    return result.training is not None and result.training.peak_bytes is not None


def saving(result: Result, base: Result) -> int:
    """Returns the bytes that a variant saves if they are worth mentioning; otherwise 0."""
    ours, fp32 = needed(result), needed(base)
    if has_peak(result) is not has_peak(base):
        return 0
    less = ours and fp32 and ours <= LEAST_MEMORY_GAIN * fp32
    return fp32 - ours if less and fp32 - ours >= LEAST_BYTES_MENTIONED else 0


def saving_text(result: Result, base: Result) -> str:
    """Returns the saving such as ``"40 % less memory (1.2 GB)"``; empty if there is none."""
    saved = saving(result, base)
    return f"{saved / needed(base):.0%} less memory ({megabytes(saved)})" if saved else ""


def megabytes(count: int) -> str:
    """Returns bytes as megabytes, or as kilobytes below 0.1 MB."""
    value = count / 1e6
    if value < 0.1:
        return f"{count / 1e3:.1f} kB"
    return f"{value:.0f} MB" if value >= 100 else f"{value:.1f} MB"
