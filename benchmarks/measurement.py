"""The result of a benchmark: a value, its spread, and a goal."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Literal

Relation = Literal["<=", "<", ">=", "=="]

_HOLDS: dict[Relation, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Goal:
    """A bound that a value should meet.

    Attributes:
        relation: Relation of the value to the bound.
        bound: Bound in the value's unit.
    """

    relation: Relation
    bound: float

    def holds(self, value: float, digits: int) -> bool:
        """Returns whether ``value``, rounded to the printed ``digits``, meets the bound."""
        return _HOLDS[self.relation](round(value, digits), self.bound)

    def __str__(self) -> str:
        """Returns the goal as the table shows it."""
        return f"{self.relation} {self.bound:g}"


@dataclass(frozen=True)
class Measurement:
    """One figure.

    Attributes:
        benchmark: Name of the benchmark that took it.
        case: What was measured.
        value: The figure; a median where there are several samples.
        unit: Its unit; "x" for a ratio.
        goal: The bound to keep; ``None`` for a figure given for comparison only.
        low: First quartile of the samples; equal to ``value`` for an exact figure.
        high: Third quartile of the samples.
        digits: Decimals to print and to judge by.
    """

    benchmark: str
    case: str
    value: float
    unit: str
    goal: Goal | None = None
    low: float = math.nan
    high: float = math.nan
    digits: int = 2

    @property
    def passed(self) -> bool | None:
        """Whether the goal is kept; ``None`` without a goal."""
        return None if self.goal is None else self.goal.holds(self.value, self.digits)

    def as_json(self) -> dict[str, object]:
        """Returns the figure and its verdict as plain data."""
        data = {key: _no_nan(value) for key, value in asdict(self).items()}
        return data | {"goal": self.goal and str(self.goal), "passed": self.passed}


def sampled(
    benchmark: str,
    case: str,
    samples: Sequence[float],
    unit: str,
    *,
    goal: Goal | None = None,
    digits: int = 2,
) -> Measurement:
    """Returns the median of ``samples`` with their quartiles."""
    if len(samples) == 1:
        low = high = samples[0]
    else:
        low, _, high = quantiles(samples, n=4)
    return Measurement(benchmark, case, median(samples), unit, goal, low, high, digits)


def table(measurements: Sequence[Measurement]) -> str:
    """Returns the figures as aligned text."""
    head = ("benchmark", "case", "figure", "quartiles", "goal", "")
    lines: list[Sequence[str]] = [head, *(_cells(m) for m in measurements)]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    text = [_align(line, widths) for line in lines]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def verdict(measurements: Sequence[Measurement]) -> str:
    """Returns a sentence with the number of goals met and the goals missed."""
    judged = [m for m in measurements if m.passed is not None]
    missed = [f"{m.benchmark}: {m.case}" for m in judged if not m.passed]
    text = f"{len(judged) - len(missed)} of {len(judged)} goals met"
    if missed:
        text += f"; missed: {'; '.join(missed)}"
    return f"{text}."


def _cells(m: Measurement) -> tuple[str, ...]:
    spread = "" if math.isnan(m.low) else f"{m.low:.{m.digits}f} .. {m.high:.{m.digits}f}"
    mark = {True: "pass", False: "FAIL", None: ""}[m.passed]
    return (
        m.benchmark,
        m.case,
        f"{m.value:.{m.digits}f} {m.unit}",
        spread,
        "" if m.goal is None else str(m.goal),
        mark,
    )


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:5], widths[2:5], strict=True)]
    return "  ".join([*left, *right, cells[5]]).rstrip()


def _no_nan(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value
