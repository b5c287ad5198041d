"""Gradients in fp16's range with and without a loss scale, and the course of a dynamic scale."""

from __future__ import annotations

import itertools
import math

from apex._core.scale import ScaleRule, ScaleState, next_scale
from docs.figures.svg import Drawing

# Histogram of the 380,362 gradients of examples/digits by power of two, in fp32 with seed 0 at step
# 100. No gradient is 0.
GRADIENTS = {
    -32: 1, -31: 1, -30: 5, -29: 7, -28: 16, -27: 31, -26: 47, -25: 109, -24: 212, -23: 495,
    -22: 884, -21: 1674, -20: 3363, -19: 6478, -18: 13527, -17: 26507, -16: 50529, -15: 85393,
    -14: 102858, -13: 62494, -12: 18141, -11: 4903, -10: 2161, -9: 523, -8: 3,
}  # fmt: skip
_SCALE = 16  # of the first loss scale, 2 ** 16
_FIRST, _LAST = -34, 18
_NORMAL, _SUBNORMAL, _END = -14, -24, 16  # fp16
_LEFT, _WIDTH, _TALL = 20, 590, 92

_STEPS = 16000
_RULE = ScaleRule(max_scale=2.0**24)


def below_normal() -> float:
    """Returns the share of gradients below fp16's normal range."""
    return sum(n for power, n in GRADIENTS.items() if power < _NORMAL) / sum(GRADIENTS.values())


def history(steps: int = _STEPS) -> list[ScaleState]:
    """Returns the state before each step while the largest gradient falls from 2 to 1/8."""
    states = [ScaleState(2.0**16, 0)]
    for step in range(steps):
        largest = 2.0 ** (1 - 4 * step / steps)
        overflow = largest * states[-1].scale > 65504
        states.append(next_scale(states[-1], _RULE, overflow=overflow))
    return states


def draw() -> str:
    """Returns the figure."""
    drawing = Drawing(
        "loss_scaling", 630, 566,
        says=f"{below_normal():.0%} of the gradients of the digits example are below fp16's normal "
        "range; multiplied by 65536, all but a few are inside it. Below, a dynamic loss scale over "
        "16,000 steps: it halves at each overflow and doubles after 2000 clean steps",
    )  # fmt: skip
    _range(drawing, 24, 0, "unscaled gradients", "bad")
    _range(drawing, 154, _SCALE, "multiplied by a loss scale of 2¹⁶", "bf16")
    _axis(drawing, 280)
    _stairs(drawing, 360)
    return drawing.render()


def _range(drawing: Drawing, y: float, shift: int, label: str, kind: str) -> None:
    base = y + _TALL + 18
    drawing.box(_x(_NORMAL), y, _x(_END) - _x(_NORMAL), base - y, kind="fp16")
    drawing.solid(_x(_SUBNORMAL), y, _x(_NORMAL) - _x(_SUBNORMAL), base - y, "fp16", opacity=0.07)
    most = max(GRADIENTS.values())
    wide = _x(1) - _x(0)
    for power, count in GRADIENTS.items():
        # Square roots, so that a share of a thousandth is still visible.
        tall = max(_TALL * math.sqrt(count / most), 1.5)
        drawing.solid(_x(power + shift) + 1, base - tall, wide - 2, tall, kind)
    drawing.rule(_LEFT, base, _LEFT + _WIDTH, base)
    drawing.text(_LEFT, y + 14, label, f"small {kind}")
    if not shift:
        drawing.text(_x(1), y + 16, "fp16 normal range", "small fp16", "middle")
        drawing.text(_x(_LAST - 2) + 4, y + 60, "inf", "small muted")
        drawing.text(_LEFT, y + 34, f"{below_normal():.0%} below normal", "small muted")


def _axis(drawing: Drawing, y: float) -> None:
    for power in range(-32, 17, 8):
        drawing.text(_x(power), y + 10, f"2{_superscript(power)}", "small", "middle")
    drawing.text(_x(_SUBNORMAL) + 6, y + 26, "fp16 subnormal", "small fp16")
    drawing.text(_x(_SUBNORMAL) - 6, y + 26, "0 in fp16", "small muted", "end")


def _stairs(drawing: Drawing, y: float) -> None:
    left, width, tall = 58, 552, 140
    low, high = 13.6, 19.2
    states = history()

    def place(step: int, scale: float) -> tuple[float, float]:
        share = (math.log2(scale) - low) / (high - low)
        return left + width * step / _STEPS, y + tall * (1 - share)

    drawing.text(left, y - 8, "a dynamic loss scale", "small muted")
    for power in range(14, 20):
        _, level = place(0, 2.0**power)
        drawing.rule(left, level, left + width, level)
        drawing.text(left - 8, level + 4, f"2{_superscript(power)}", "small", "end")
    points = [place(0, states[0].scale)]
    for step, (before, after) in enumerate(itertools.pairwise(states), 1):
        if after.scale != before.scale:
            points += [place(step, before.scale), place(step, after.scale)]
        if after.scale < before.scale:
            x, top = place(step, before.scale)
            drawing.solid(x - 3.5, top - 3.5, 7, 7, "bad", rx=3.5)
    drawing.line([*points, place(_STEPS, states[-1].scale)], "fp32")
    for step in range(0, _STEPS + 1, 4000):
        x, _ = place(step, 2.0**low)
        drawing.text(x, y + tall + 20, f"{step:,}", "small", "middle")
    drawing.text(
        left, y + tall + 40, "steps; each dot is an overflow and a skipped step", "small muted"
    )


def _x(power: float) -> float:
    return _LEFT + _WIDTH * (power - _FIRST) / (_LAST - _FIRST)


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
