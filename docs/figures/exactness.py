"""The bits of one weight as it passes through a checkpoint."""

from __future__ import annotations

import struct

import torch

from docs.figures.svg import Drawing

_WEIGHT = 1 / 3
_CELL = 13.5
_LEFT = 124


def bits(value: float) -> str:
    """Returns the 32 bits of a number in fp32."""
    (number,) = struct.unpack(">I", struct.pack(">f", value))
    return f"{number:032b}"


def rounded(value: float) -> float:
    """Returns the number rounded to bf16."""
    return float(torch.tensor(value).bfloat16())


def draw() -> str:
    """Returns the figure."""
    drawing = Drawing(
        "exactness", 572, 286,
        says="The 32 bits of a master of one third and the 16 bits of the bf16 weight. The "
        "state_dict holds all 32 bits; a checkpoint of only the 16-bit weight loses the lower 16",
    )  # fmt: skip
    for bit, label in (
        (0, "sign"),
        (1, "exponent"),
        (9, "7 bits of bf16"),
        (16, "16 further bits of fp32"),
    ):
        if label != "sign":
            drawing.text(_x(bit), 18, label, "small muted")
    master, weight = bits(_WEIGHT), bits(rounded(_WEIGHT))
    rows = [
        ("master", "fp32", master, 32, "fp32"),
        ("weight", "bf16", weight, 16, "bf16"),
        ("state_dict", "saved", master, 32, "fp32"),
        ("after loading", "same master", master, 32, "fp32"),
        ("without masters", "16 bits saved", weight, 32, "bad"),
    ]
    for index, row in enumerate(rows):
        _row(drawing, 28 + index * 52 + (6 if index > 1 else 0), *row, against=master)
    return drawing.render()


def _row(
    drawing: Drawing, y: float, name: str, note: str, text: str, shown: int, kind: str, against: str
) -> None:
    drawing.text(4, y + 16, name, "head")
    drawing.text(4, y + 33, note, "small muted")
    for index, bit in enumerate(text[:shown]):
        wrong = kind == "bad" and bit != against[index]
        own = "bad" if wrong else "fp32" if kind == "bad" else kind
        drawing.box(_x(index), y + 5, _CELL - 2, 26, kind=own)
        drawing.text(
            _x(index) + _CELL / 2 - 1,
            y + 23,
            bit,
            f"small code {'bad' if wrong else ''}".strip(),
            "middle",
        )


def _x(bit: int) -> float:
    gap = 5 * ((bit > 0) + (bit > 8) + (bit > 15))
    return _LEFT + bit * _CELL + gap
