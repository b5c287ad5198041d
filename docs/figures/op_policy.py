"""How op casts treat the inputs of a call, by the list of its operator."""

from __future__ import annotations

from collections import Counter

from apex._core.op_table import OpTable
from docs.figures.svg import Drawing

_LOW = "16 bits"
_LANES = [
    (
        "low precision",
        ("low_precision", "destination", "recurrent"),
        ["fp32", _LOW],
        ["linear, conv, matmul, bmm,", "einsum, attention, LSTM, GRU"],
        _LOW,
    ),
    (
        "fp32",
        ("fp32", "fp32_inplace", "banned"),
        [_LOW],
        ["exp, log, pow, sum, norm, softmax,", "layer_norm, losses, gelu (fp16)"],
        "fp32",
    ),
    (
        "widest input",
        ("promote",),
        [_LOW, "fp32"],
        ["addcmul, bilinear, cross, dot;", "by torch's own rule: add, mul, cat"],
        "fp32",
    ),
    ("no row", (), [_LOW], ["relu, max_pool, dropout,", "mean, batch_norm, view"], _LOW),
]
_LANE = 82


def draw() -> str:
    """Returns the figure."""
    rows = Counter(OpTable.default().rows.values())
    drawing = Drawing(
        "op_policy", 620, 36 + _LANE * len(_LANES),
        says="Inputs, operators and output dtype of the low-precision list, the fp32 list, the "
        "promoting operators and all others",
    )  # fmt: skip
    for x, name in ((4, "list"), (140, "inputs"), (232, "operators"), (536, "result")):
        drawing.text(x, 20, name, "small muted")
    for index, (name, categories, inputs, operators, output) in enumerate(_LANES):
        y = 32 + index * _LANE
        drawing.rule(0, y, 620, y)
        drawing.text(4, y + 38, name, "head")
        count = sum(rows[category] for category in categories)
        drawing.text(4, y + 57, f"{count} rows" if count else "all others", "small muted")
        _call(drawing, y, inputs, operators, output)
    return drawing.render()


def _call(drawing: Drawing, y: float, inputs: list[str], operators: list[str], output: str) -> None:
    middle = y + _LANE / 2
    step = 30
    top = middle - step * len(inputs) / 2
    for index, dtype in enumerate(inputs):
        centre = top + step * (index + 0.5)
        _chip(drawing, 136, centre, dtype)
        drawing.arrow([(202, centre), (226, centre)])
    drawing.box(230, y + 12, 266, _LANE - 24)
    for index, line in enumerate(operators):
        drawing.text(363, middle - 5 + 20 * index, line, "small", "middle")
    drawing.arrow([(500, middle), (526, middle)])
    _chip(drawing, 530, middle, output)


def _chip(drawing: Drawing, x: float, centre: float, dtype: str) -> None:
    kind = "fp32" if dtype == "fp32" else "bf16"
    drawing.box(x, centre - 12, 62, 24, dtype, kind)
