"""Bytes per parameter of each training: what is stored, and the gradients at the peak of a step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apex import amp
from apex.tools.compare.training import stored
from docs.figures.svg import Drawing

RESULTS = Path(__file__).parents[2] / "benchmarks/results/cpu.json"

_TRAININGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "O0, O1, O4": ("O0", {}, "peak, torch.autocast"),
    "O5": ("O5", {}, "peak, O5"),
    "O2": ("O2", {"loss_scale": 128.0}, "peak, O2"),
    "O3": ("O3", {"cast_model_type": torch.bfloat16}, ""),
}
"""Level, options of amp.initialize, and the benchmark's case of the peak, if it has one."""

_BLOCKS: dict[str, tuple[dict[str, Any], int, int]] = {
    "O5, 8-bit moments": ({}, 8, 256),
    "O5, fp8 moments": ({}, 8, 256),
    "O5, 4-bit moments": ({}, 4, 128),
}
"""Options, bits of a moment in torchao, and the elements that share one fp32 scale."""

_KINDS = {"weights": "bf16", "masters": "fp32", "moments": "plain", "gradients": "fp16"}
_LEFT, _ROW, _UNIT = 150, 44, 26  # the bars' edge, a row's height, and the width of a byte


@dataclass(frozen=True)
class Bytes:
    """Bytes per parameter; ``gradients`` is 0 where the peak is not measured."""

    weights: float
    masters: float
    moments: float
    gradients: float = 0.0

    @property
    def stored(self) -> float:
        """Bytes between two steps."""
        return self.weights + self.masters + self.moments

    def parts(self) -> list[tuple[str, float]]:
        """Returns the parts that are there, by name."""
        return [(name, size) for name in _KINDS if (size := getattr(self, name))]


def values() -> dict[str, Bytes]:
    """Returns the bytes of every training: stored ones counted, peaks read from the benchmark."""
    peaks = {each["case"]: each["value"] for each in json.loads(RESULTS.read_text())["figures"]}
    found = {}
    for name, (level, options, case) in _TRAININGS.items():
        own = _stored(level, options)
        found[name] = Bytes(*own, gradients=peaks[case] - sum(own) if case else 0.0)
    for name, (options, bits, block) in _BLOCKS.items():
        weights, masters, _ = _stored("O5", options)
        found[name] = Bytes(weights, masters, 2 * (bits / 8 + 4 / block))
    return found


def _stored(level: str, options: dict[str, Any]) -> tuple[float, float, float]:
    """Returns the bytes per parameter of a small model after a step: weights, masters, moments."""
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    with amp.scale_loss(model(torch.ones(1, 256)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    found = stored(model, optimizer)
    amp.restore(model, optimizer)
    sizes = found.model, found.masters, found.optimizer
    return tuple(round(size / found.params, 1) for size in sizes)  # the step count is 4 bytes


def draw() -> str:
    """Returns the figure."""
    trainings = values()
    drawing = Drawing(
        "memory", 640, 44 + _ROW * len(trainings),
        says="Stacked bars of the bytes per parameter that trainings with AdamW take: weights, "
        "masters and moments, and the gradients at the peak of a step",
    )  # fmt: skip
    for index, (name, kind) in enumerate(_KINDS.items()):
        drawing.box(_LEFT + index * 102, 8, 16, 16, kind=kind)
        label = "gradients at the peak" if name == "gradients" else name
        drawing.text(_LEFT + index * 102 + 22, 21, label, "small muted")
    for index, (name, each) in enumerate(trainings.items()):
        _row(drawing, 36 + index * _ROW, name, each)
    return drawing.render()


def _row(drawing: Drawing, y: float, name: str, each: Bytes) -> None:
    drawing.text(4, y + 20, name, "small head")
    drawing.text(4, y + 35, f"{each.stored:.1f} stored", "small muted")
    x = float(_LEFT)
    for part, size in each.parts():
        drawing.box(x, y + 6, size * _UNIT, 30, f"{size:.1f}".removesuffix(".0"), _KINDS[part])
        x += size * _UNIT
    if each.gradients:
        drawing.text(x + 8, y + 26, f"{each.stored + each.gradients:.1f}", "head")
