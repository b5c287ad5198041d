"""The recommended level, with the measurements behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import stdev

from apex.tools.results import Comparison, Recommendation, Result
from apex.tools.training import end_loss, last
from apex.tools.variants import BASELINE, SHORT

LEAST_GAIN = 1.05
"""Least speed-up that justifies a change of numerics."""

LEAST_MEMORY_GAIN = 0.9
"""Largest share of fp32's memory that justifies it, ..."""

LEAST_BYTES_SAVED = 32e6
"""... if it also saves this many bytes."""

MOST_FROZEN = 0.05
MOST_SKIPPED = 0.1
LOSS_TOLERANCE = 0.05


def recommendation(comparison: Comparison) -> Recommendation:
    """Returns the fastest variant that trains as well as fp32, or fp32 if none gains anything."""
    base = comparison.baseline
    if base.training is None:
        return Recommendation(
            BASELINE,
            "No recommendation: the fp32 baseline failed.",
            base.errors,
        )
    if len(comparison.results) == 1:
        return Recommendation(BASELINE, "Nothing to compare: only fp32 was trained.", ())
    refusals = {result.name: _refusal(result, base) for result in comparison.results}
    sound = [r for r in comparison.results if r.variant.advised and not refusals[r.name]]
    gaining = [result for result in sound if gains(result, base)]
    best = _first_of_the_fastest(gaining)
    others = _grouped(refusals)
    if best is None:
        text = "Stay in fp32: " + _because(sound, base)
        return Recommendation(BASELINE, text, tuple(others))
    text = f"Use {best.name} ({best.variant.meaning}): {_gain(best, base)}."
    return Recommendation(best.name, text, (*_reasons(best, base), *others))


def speedup(result: Result, base: Result) -> float | None:
    """Returns a variant's speed relative to fp32; ``None`` if it was not timed."""
    if result.timing is None or base.timing is None or not result.timing.median:
        return None
    return base.timing.median / result.timing.median


def gains(result: Result, base: Result) -> bool:
    """Returns whether a variant is clearly faster than fp32, or clearly smaller and no slower."""
    speed = speedup(result, base)
    if speed is None or result.timing is None or base.timing is None:
        return False
    if speed >= LEAST_GAIN and result.timing.high < base.timing.low:
        return True
    saved = _memory(base) - _memory(result)
    smaller = _memory_ratio(result, base) <= LEAST_MEMORY_GAIN and saved >= LEAST_BYTES_SAVED
    return smaller and speed >= 1 / LEAST_GAIN


def loss_is_worse(result: Result, base: Result) -> bool:
    """Returns whether a variant's final loss exceeds fp32's by more than fp32's own noise."""
    if result.training is None or base.training is None:
        return False
    losses = base.training.losses[: len(result.training.losses)]
    ours, fp32 = end_loss(result.training.losses), end_loss(losses)
    return ours > fp32 + max(2 * _noise(losses), LOSS_TOLERANCE * abs(fp32))


def _first_of_the_fastest(results: list[Result]) -> Result | None:
    """Returns the first variant in the table that is as fast as the fastest, within its spread."""
    fastest = min(results, key=_time, default=None)
    if fastest is None or fastest.timing is None:
        return None
    alike = max(fastest.timing.high, fastest.timing.median * LEAST_GAIN)
    return next(result for result in results if _time(result) <= alike)


def _refusal(result: Result, base: Result) -> str:
    """Returns why a variant is ruled out; empty if it is not."""
    record = result.training
    own = [
        error for error in result.errors if error not in base.errors
    ]  # shared ones are the target's
    if own or record is None:
        return "; ".join(own or result.errors)
    if result.name == base.name:
        return ""
    name = SHORT[result.variant.dtype]
    frozen = max((share for _, share in record.frozen), default=0.0)
    rules = (
        (
            result.emulated,
            f"{name} is emulated on this machine"
            + ("" if result.slowdown is None else f" ({result.slowdown:.0f}x the time of fp32)"),
        ),
        (not math.isfinite(record.losses[-1]), "the final loss is not finite"),
        (not result.emulated and loss_is_worse(result, base), _worse(result, base)),
        (
            frozen > MOST_FROZEN,
            f"rounding lost the updates of up to {frozen:.0%} of the weights",
        ),
        (
            len(record.skipped) > 2 + MOST_SKIPPED * len(record.losses),
            f"{len(record.skipped)} of {len(record.losses)} steps were skipped",
        ),
    )
    return "; ".join(reason for holds, reason in rules if holds)


def _grouped(refusals: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason, with the names of the levels it applies to."""
    names: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        if reason:
            names.setdefault(reason, []).append(name)
    return [f"{', '.join(who)}: {reason.rstrip('.')}." for reason, who in names.items()]


def _worse(result: Result, base: Result) -> str:
    if result.training is None or base.training is None:
        return ""
    fp32 = end_loss(base.training.losses[: len(result.training.losses)])
    return f"final loss {end_loss(result.training.losses):.4g}, against {fp32:.4g} in fp32"


def _because(sound: list[Result], base: Result) -> str:
    """Returns why no variant gains."""
    timed = [result for result in sound if result.timing is not None]
    if not timed:
        return "no other level trained successfully on this machine."
    best = min(timed, key=_time)
    speed = speedup(best, base) or 0.0
    return (
        f"the fastest usable level, {best.name}, runs at {speed:.2f}x the speed of fp32 "
        f"({_spread(best)} a step against {_spread(base)}) and uses "
        f"{_memory_ratio(best, base):.0%} of its memory."
    )


def _gain(best: Result, base: Result) -> str:
    speed = speedup(best, base) or 1.0
    ratio = _memory_ratio(best, base)
    words = [f"{speed:.2f}x as fast as fp32"]
    if ratio <= LEAST_MEMORY_GAIN:
        words.append(f"{1 - ratio:.0%} less memory")
    if speed < LEAST_GAIN:
        words.reverse()
    return ", ".join([*words, "and a final loss within the noise of fp32"])


def _reasons(best: Result, base: Result) -> list[str]:
    reasons = [f"Time: {_spread(best)} a step, against {_spread(base)} in fp32."]
    if best.training is not None and base.training is not None:
        losses = base.training.losses
        reasons.append(
            f"Final loss: {end_loss(best.training.losses):.4g}, against "
            f"{end_loss(losses):.4g} in fp32 (standard deviation {_noise(losses):.2g})."
        )
        reasons.append(
            f"Stored: {best.training.stored.per_param:.1f} bytes per parameter, against "
            f"{base.training.stored.per_param:.1f}."
        )
    if best.probe is not None and base.probe is not None:
        reasons.append(
            f"Saved for backward: {megabytes(best.probe.activation_bytes)}, against "
            f"{megabytes(base.probe.activation_bytes)}."
        )
    return reasons


def megabytes(count: int) -> str:
    """Returns bytes as megabytes, or as kilobytes below 0.1 MB."""
    value = count / 1e6
    if value < 0.1:
        return f"{count / 1e3:.1f} kB"
    return f"{value:.0f} MB" if value >= 100 else f"{value:.1f} MB"


def _memory_ratio(result: Result, base: Result) -> float:
    """Returns a variant's memory relative to fp32."""
    ours, fp32 = _memory(result), _memory(base)
    return ours / fp32 if ours and fp32 else 1.0


def _memory(result: Result) -> int:
    if result.training is None or result.probe is None:
        return 0
    if result.training.peak_bytes is not None:
        return result.training.peak_bytes
    stored = result.training.stored
    return stored.model + stored.masters + stored.optimizer + result.probe.activation_bytes


def _time(result: Result) -> float:
    return math.inf if result.timing is None else result.timing.median


def _spread(result: Result) -> str:
    timing = result.timing
    if timing is None:
        return "not timed"
    return f"{timing.median:.3g} ms ({timing.low:.3g} to {timing.high:.3g})"


def _noise(losses: tuple[float, ...]) -> float:
    steps = last(losses)
    return stdev(steps) if len(steps) > 1 else 0.0
