"""One training step with masters, and their effect on small updates of one weight."""

from __future__ import annotations

import itertools

import torch

from docs.figures.svg import Drawing

_UPDATE = 1e-3
_STEPS = 16
_LEFT, _TOP, _WIDTH, _HEIGHT = 92, 244, 500, 190


def draw() -> str:
    """Returns the figure."""
    drawing = Drawing(
        "master_weights", 620, 474,
        says="The fp32 master is rounded to the 16-bit weight; the weight's 16-bit gradient is "
        "converted to fp32 for the optimizer step. Below, 16 updates of 0.001 to a weight of 1: "
        "with a master the bf16 weight rises in steps of 0.0078, without one it stays at 1",
    )  # fmt: skip
    _loop(drawing)
    _plot(drawing)
    return drawing.render()


def values(steps: int = _STEPS) -> tuple[list[float], list[float], list[float]]:
    """Returns the master, its rounded weight, and a weight without a master, at every step."""
    master = torch.tensor(1.0)
    alone = torch.tensor(1.0, dtype=torch.bfloat16)
    rows = [(1.0, 1.0, 1.0)]
    for _ in range(steps):
        master = master + _UPDATE
        alone = (alone + _UPDATE).bfloat16()
        rows.append((float(master), float(master.bfloat16()), float(alone)))
    masters, rounded, without = zip(*rows, strict=True)
    return list(masters), list(rounded), list(without)


def _loop(drawing: Drawing) -> None:
    drawing.box(4, 30, 150, 44, "fp32 master", "fp32")
    drawing.box(236, 30, 150, 44, "16-bit weight", "bf16")
    drawing.box(466, 30, 150, 44, "16-bit gradient", "bf16")
    drawing.box(466, 132, 150, 44, "fp32 gradient", "fp32")
    drawing.box(236, 132, 150, 44, "optimizer step", "fp32")
    drawing.arrow([(158, 52), (230, 52)])
    drawing.arrow([(390, 52), (460, 52)])
    drawing.arrow([(541, 78), (541, 126)])
    drawing.arrow([(462, 154), (392, 154)])
    drawing.arrow([(232, 154), (79, 154), (79, 80)])
    drawing.text(194, 42, "round", "small muted", "middle")
    drawing.text(425, 22, "forward, backward", "small muted", "middle")
    drawing.text(533, 107, "cast to fp32, divide by the loss scale", "small muted", "end")
    drawing.text(155, 172, "update", "small muted", "middle")


def _plot(drawing: Drawing) -> None:
    masters, rounded, alone = values()
    eps = torch.finfo(torch.bfloat16).eps
    drawing.text(_LEFT, _TOP - 18, "a weight of 1 with updates of +0.001", "small muted")
    for step in range(3):
        y = _y(1 + step * eps)
        drawing.rule(_LEFT, y, _LEFT + _WIDTH, y)
        drawing.text(_LEFT - 8, y + 4, f"{1 + step * eps:.4f}", "small code", "end")
    for step in range(0, _STEPS + 1, 4):
        drawing.text(_x(step), _TOP + _HEIGHT + 20, str(step), "small", "middle")
    drawing.text(_LEFT + _WIDTH, _TOP + _HEIGHT + 38, "steps", "small muted", "end")
    drawing.line([(_x(n), _y(value)) for n, value in enumerate(masters)], "fp32")
    drawing.line(_stairs(rounded), "bf16")
    drawing.line(_stairs(alone), "bad", dashed=True)
    drawing.text(_x(10.1), _y(1.0118), "fp32 master", "small fp32", "end")
    drawing.text(_x(8.3), _y(1.0078) + 18, "bf16 weight with a master", "small bf16")
    drawing.text(_x(15.9), _y(1.0) - 8, "bf16 weight without a master", "small bad", "end")
    drawing.text(_LEFT - 8, _TOP + _HEIGHT + 20, "bf16 values", "small muted", "end")


def _stairs(values: list[float]) -> list[tuple[float, float]]:
    points = [(_x(0), _y(values[0]))]
    for n, (before, after) in enumerate(itertools.pairwise(values), 1):
        if after != before:
            points += [(_x(n), _y(before)), (_x(n), _y(after))]
    return [*points, (_x(_STEPS), _y(values[-1]))]


def _x(step: float) -> float:
    return _LEFT + _WIDTH * step / _STEPS


def _y(value: float) -> float:
    return _TOP + _HEIGHT * (1 - (value - 1) / 0.0165)
