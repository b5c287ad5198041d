"""Whether a variant trains as well as fp32, and if not, why."""

from __future__ import annotations

import math
from statistics import stdev

from apex.tools.results import Comparison, Result, Training
from apex.tools.training import end_loss, last

MOST_FROZEN = 0.05
MOST_SKIPPED = 0.1
LOSS_TOLERANCE = 0.05


def refusal(result: Result, comparison: Comparison) -> str:
    """Returns why a variant is ruled out; empty if it is not."""
    base = comparison.baseline
    if result.name == base.name:
        return ""
    own = [error for error in result.errors if error not in base.errors]  # shared: the target's
    if result.skipped:
        return f"{_without_hardware(result)}; --emulated trains it for a few steps"
    record = result.training
    if own or record is None or base.training is None:
        return "; ".join(own or result.errors)
    frozen = _frozen(record)
    lost = frozen - _frozen(base.training)  # by the level
    skipped, steps = len(record.skipped), len(record.losses)
    rules = (
        (result.emulated, _emulated(result, comparison)),
        (not math.isfinite(record.losses[-1]), "the final loss is not finite"),
        (not result.emulated, _worse(record, base.training)),
        (lost > MOST_FROZEN, f"rounding lost the updates of up to {frozen:.0%} of the weights"),
        (skipped > 2 + MOST_SKIPPED * steps, f"{skipped} of {steps} steps were skipped"),
    )
    return "; ".join(reason for holds, reason in rules if holds and reason)


def noise(losses: tuple[float, ...]) -> float:
    """Returns the standard deviation of the last steps' losses; NaN if one is not finite."""
    steps = last(losses)
    if not all(map(math.isfinite, steps)):
        return math.nan
    return stdev(steps) if len(steps) > 1 else 0.0


def _frozen(record: Training) -> float:
    """Returns the largest share of the weights whose update was lost at one step."""
    return max((share for _, share in record.frozen), default=0.0)


def _emulated(result: Result, comparison: Comparison) -> str:
    speed = comparison.speed(result)
    return _without_hardware(result) + (
        "" if speed is None else f": {speed.median:.2f}x the speed of fp32"
    )


def _without_hardware(result: Result) -> str:
    name = result.variant.short_dtype
    if result.slowdown is None:
        return f"{name} is not supported by this machine"
    return f"{name} is emulated on this machine"


def _worse(record: Training, base: Training) -> str:
    """Returns the final losses if a variant's exceeds fp32's by more than fp32's own noise."""
    losses = base.losses[: len(record.losses)]
    ours, fp32 = end_loss(record.losses), end_loss(losses)
    if not ours > fp32 + max(2 * noise(losses), LOSS_TOLERANCE * abs(fp32)):
        return ""
    return f"final loss {ours:.4g}, against {fp32:.4g} in fp32"
