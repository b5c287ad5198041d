"""Decides whether a level trains as well as fp32, and states what rules it out.

Note [Paired differences]
    All levels see the same batches, so a level's loss is compared with fp32's step by step. Thus
    neither the trend of a falling loss nor the difficulty of a batch counts as noise. A level
    trains worse if three conditions hold over the last third of the steps:

    - Its mean loss is more than ``MOST_EXCESS`` above fp32's.
    - The mean difference is more than ``LEAST_ERRORS`` of its standard errors above 0.
    - At least ``LEAST_WORSE`` of the differences are above 0. Neighbouring steps are not
      independent, which makes the standard error too small.

    This was measured on twelve small models with 40 seeds and 60 steps. Losses 5 % above fp32's are
    always found, except where fp32 itself does not settle. Neither a bf16 run nor a run from
    weights that differ by 2^-9 is accused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, stdev

import torch

from apex.tools.compare.results import Result, Training

LEAST_STEPS = 20
"""Fewest steps from which training can be judged."""

LEAST_WINDOW = 8
"""Fewest steps that are compared."""

MOST_EXCESS = 0.02
"""Largest mean excess over fp32's loss, relative to it, of a level that trains as well."""

LEAST_ERRORS = 3.0
LEAST_WORSE = 0.85

MOST_FROZEN = 0.05
MOST_SKIPPED = 0.1


@dataclass(frozen=True)
class Excess:
    """The difference between a level's loss and fp32's on the same batches, over the last steps.

    Attributes:
        steps: Number of steps that are compared.
        worse: Number of steps at which the level's loss is higher.
        mean: Mean difference.
        error: Standard error of this mean.
        fp32: Mean of fp32's losses.
        size: Mean of their absolute values, to which the shares are relative.
        fall: Fall of fp32's loss per step; 0 if it does not fall.
    """

    steps: int
    worse: int
    mean: float
    error: float
    fp32: float
    size: float
    fall: float

    @property
    def share(self) -> float:
        """The mean difference relative to fp32's loss; 0 if that is 0."""
        return self.mean / self.size if self.size else 0.0

    @property
    def share_error(self) -> float:
        """The standard error relative to fp32's loss; 0 if that is 0."""
        return self.error / self.size if self.size else 0.0


def excess(losses: Sequence[float], fp32: Sequence[float]) -> Excess | None:
    """Returns a level's excess over fp32 at the end of ``losses``; None without finite pairs."""
    window = max(LEAST_WINDOW, len(losses) // 3)
    pairs = list(zip(losses, fp32, strict=False))
    differences = []
    base = []
    for loss, base_loss in pairs[-window:]:
        difference = loss - base_loss
        if math.isfinite(difference):
            differences.append(difference)
            base.append(base_loss)
    steps = len(differences)
    if steps < 2:
        return None
    worse = [difference for difference in differences if difference > 0]
    slope, _ = linear_regression(range(steps), base)
    return Excess(
        steps=steps,
        worse=len(worse),
        mean=fmean(differences),
        error=stdev(differences) / math.sqrt(steps),
        fp32=fmean(base),
        size=fmean(map(abs, base)),
        fall=max(-slope, 0.0),
    )


def fault(result: Result, baseline: Result) -> str:
    """Returns why a level's training rules it out; empty if it trains as well as fp32."""
    faults = [error for error in result.errors if error not in baseline.errors]
    record = result.training
    base = baseline.training
    if record is not None and base is not None:
        faults += _faults(result, record, base)
    return "; ".join(faults)


def _faults(result: Result, record: Training, base: Training) -> Iterator[str]:
    steps = len(record.losses)
    if result.has_diverged:
        yield "the final loss is not finite"
    elif steps >= LEAST_STEPS:
        yield from _loss_faults(record, base, result.level.dtype)
    frozen = record.frozen or 0.0
    if frozen - (base.frozen or 0.0) > MOST_FROZEN:
        yield f"rounding lost the updates of up to {frozen:.0%} of the weights"
    if record.skipped > 2 + MOST_SKIPPED * steps:
        yield f"{record.skipped} of {steps} steps were skipped"


def _loss_faults(record: Training, base: Training, dtype: torch.dtype) -> Iterator[str]:
    """Yields the losses if a level's is higher than fp32's; see Note [Paired differences].

    A level may be as many steps behind as it skipped. A loss close to 0 may differ by the squared
    error that comes from rounding the outputs to the level's dtype.
    """
    loss = excess(record.losses, base.losses)
    if loss is None:
        return
    behind = record.skipped * loss.fall
    rounding = (torch.finfo(dtype).eps / 2) ** 2 * abs(base.losses[0])
    allowed = max(MOST_EXCESS * loss.size, rounding)
    is_large = loss.mean > allowed + behind
    is_certain = loss.mean > LEAST_ERRORS * loss.error
    is_frequent = loss.worse >= LEAST_WORSE * loss.steps
    if is_large and is_certain and is_frequent:
        figures = (
            f"loss {loss.fp32 + loss.mean:.4g}, against {loss.fp32:.4g} in fp32: {loss.share:.1%} "
            f"higher on the same batches (standard error {loss.share_error:.1%}), in {loss.worse} "
            f"of the last {loss.steps} steps"
        )
        yield figures.replace("%", " %")
