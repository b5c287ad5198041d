"""What casts each row of the op table on each device type: torch's autocast or apex's kernels."""

from __future__ import annotations

import math
from collections import Counter

from apex._core.op_table import COVERED_INSIDE, OpTable
from apex._engine.autocast.region import (
    _registry,  # the registry's own coverage: the kernels it would add
)
from docs.figures.svg import Drawing

TORCH = "2.13"
"""The torch release whose autocast the figure shows."""

_DEVICES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
_COLUMNS, _TOP, _STEP, _DOT, _FAINT = 12, 54, 11, 8, 0.45


def deciders(device: str) -> dict[str, str]:
    """Returns what casts each operator of the table: ``torch``, ``apex`` or ``inner`` rows."""
    coverage = _registry._coverage_of(device)
    found = dict.fromkeys(OpTable.default().rows, "torch")
    found.update(dict.fromkeys(COVERED_INSIDE - set(coverage.native), "inner"))
    for group in coverage.groups(OpTable.default()):
        found.update(dict.fromkeys(group.ops, "apex"))
    return found


def draw() -> str:
    """Returns the figure."""
    lines = math.ceil(len(OpTable.default().rows) / _COLUMNS)
    legend = _TOP + lines * _STEP + 6
    drawing = Drawing(
        "devices", 600, legend + 22,
        says=f"Rows of the op table by device: how many torch {TORCH}'s autocast covers, and how "
        "many apex adds. "
        + "; ".join(f"{name}: {_sentence(device)}" for device, name in _DEVICES.items()),
    )  # fmt: skip
    for index, (device, name) in enumerate(_DEVICES.items()):
        _panel(drawing, 8 + index * 150, name, deciders(device))
    drawing.squares([(8, legend)], _DOT, "plain", _FAINT)
    drawing.text(22, legend + 9, f"torch {TORCH}'s own autocast", "small")
    drawing.squares([(228, legend)], _DOT, "fp16")
    drawing.text(242, legend + 9, "added by apex during a session", "small")
    return drawing.render()


def _panel(drawing: Drawing, x: float, name: str, found: dict[str, str]) -> None:
    added = list(found.values()).count("apex")
    drawing.text(x, 20, name, "head")
    drawing.text(x, 40, f"{added} of {len(found)} added", "small muted")
    places = [
        (x + index % _COLUMNS * _STEP, _TOP + index // _COLUMNS * _STEP)
        for index in range(len(found))
    ]
    native = len(found) - added
    drawing.squares(places[:native], _DOT, "plain", _FAINT)
    drawing.squares(places[native:], _DOT, "fp16")


def _sentence(device: str) -> str:
    counts = Counter(deciders(device).values())
    return f"{counts['torch']} by torch, {counts['apex']} by apex"
