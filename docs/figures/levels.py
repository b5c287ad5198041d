"""The dtypes that each level stores and computes in; the width of a bar is its number of bits."""

from __future__ import annotations

import torch

from apex._core.policy import Policy
from apex.amp.properties import level_defaults, to_policy
from docs.figures.svg import Drawing

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_BITS = 2.4  # units of width per bit
_ROW = 46
_COLUMNS = {
    "weights": 44,
    "operators": 140,
    "batch norm": 288,
    "masters": 390,
    "bytes": 492,
    "loss scale": 556,
}


_LEVELS = "O0", "O1", "O2", "O3", "O4", "O5"


def draw() -> str:
    """Returns the figure."""
    height = 44 + _ROW * len(_LEVELS)
    drawing = Drawing(
        "levels", 640, height,
        says="Dtypes of weights, operators, batch norm and master weights at the levels O0 to O5, "
        "bytes per parameter, and the loss scale",
    )  # fmt: skip
    for name, x in _COLUMNS.items():
        drawing.text(x, 20, name, "small muted")
    for index, properties in enumerate(map(level_defaults, _LEVELS)):
        _row(drawing, 32 + index * _ROW, to_policy(properties))
    return drawing.render()


def _row(drawing: Drawing, y: float, policy: Policy) -> None:
    drawing.rule(0, y, 640, y)
    drawing.text(4, y + 29, policy.opt_level, "head")
    weights = _NAMES[policy.param_dtype or torch.float32]
    _bars(drawing, "weights", y, weights)
    _bars(drawing, "operators", y, *_operators(policy, weights))
    _bars(drawing, "batch norm", y, *_batch_norm(policy, weights))
    if policy.master_weights:
        _bars(drawing, "masters", y, "fp32")
    drawing.text(_COLUMNS["bytes"], y + 29, _bytes(policy, weights))
    drawing.text(_COLUMNS["loss scale"], y + 29, f"{policy.loss_scale}")


def _operators(policy: Policy, weights: str) -> tuple[str, ...]:
    return (_NAMES[policy.compute_dtype], "fp32") if policy.compute_dtype else (weights,)


def _batch_norm(policy: Policy, weights: str) -> tuple[str, ...]:
    if policy.compute_dtype:
        return ("as input",)
    return ("fp32",) if policy.batchnorm_fp32 else (weights,)


def _bytes(policy: Policy, weights: str) -> str:
    own = "4" if weights == "fp32" else "2"
    return f"{own} + 4" if policy.master_weights else own


def _bars(drawing: Drawing, column: str, y: float, *names: str) -> None:
    x = _COLUMNS[column]
    for name in names:
        bits = 16 if name.endswith("16") else 32
        drawing.box(x, y + 10, bits * _BITS, 28, name, name if name in _NAMES.values() else "plain")
        x += bits * _BITS + 4
