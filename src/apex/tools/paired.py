"""Ratios of times measured in the same rounds, with an interval that needs no assumption.

The interval of a median is that of the sign test: whatever the distribution, the number of values
below the true median is binomial with probability 1/2, so two order statistics enclose it. It
needs no random numbers, and outliers do not widen it.

Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95

LEAST_ROUNDS = 6
"""Fewest values for which an interval with this confidence exists."""


@dataclass(frozen=True)
class Interval:
    """A median and the interval that holds the true one.

    Attributes:
        median: Of the values measured.
        low: Lower end; 0 if there are too few values to tell.
        high: Upper end; infinite if there are too few values to tell.
    """

    median: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there were enough values for an interval."""
        return self.high < math.inf

    def __str__(self) -> str:
        """Returns it as a speed, such as ``"1.80x as fast as fp32 (0.90 to 2.60x)"``."""
        ends = f" ({self.low:.2f} to {self.high:.2f}x)" if self.known else ""
        return f"{self.median:.2f}x as fast as fp32{ends}"


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median of positive ``values`` and its interval.

    Raises:
        ValueError: If there are no values.
    """
    if not values:
        raise ValueError("median_interval needs at least one value.")
    ordered = sorted(values)
    outside = _rank(len(ordered))
    if not outside:
        return Interval(median(ordered), 0.0, math.inf)
    return Interval(median(ordered), ordered[outside - 1], ordered[-outside])


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Returns the median of ``above[i] / below[i]`` over the rounds that both have.

    A load that slows a whole round cancels.

    Raises:
        ValueError: If there is no such round.
    """
    return median_interval([a / b for a, b in zip(above, below, strict=False)])


def independent_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Returns the ratio of two medians measured one after the other.

    The interval divides the ends of the two medians' own intervals, which is wider than needed.

    Raises:
        ValueError: If one has no values.
    """
    one, other = median_interval(above), median_interval(below)
    if not (one.known and other.known):
        return Interval(one.median / other.median, 0.0, math.inf)
    return Interval(one.median / other.median, one.low / other.high, one.high / other.low)


def _rank(count: int) -> int:
    """Returns the rank of the order statistic that bounds the interval; 0 if there is none."""
    tail, rank = 0.0, 0
    while (tail := tail + math.comb(count, rank) / 2**count) <= (1 - CONFIDENCE) / 2:
        rank += 1
    return rank
