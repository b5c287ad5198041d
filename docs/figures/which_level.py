"""Which level to train at: a decision tree whose leaves are the levels."""

from __future__ import annotations

from docs.figures.svg import Drawing

_LEAVES = {
    "O0": (8, "fp32", ("plain fp32",)),
    "O4": (134, "bf16", ("fp32 weights,", "operators cast")),
    "O5": (260, "bf16", ("bf16 weights,", "fp32 masters")),
    "O1": (386, "fp16", ("fp32 weights,", "operators cast")),
    "O2": (512, "fp16", ("fp16 weights,", "fp32 masters")),
}
"""The left edge of each leaf, the colour of its dtype, and what the level does."""

_WIDTH, _LEAF, _QUESTION = 640, 120, 246


def draw() -> str:
    """Returns the figure."""
    drawing = Drawing(
        "which_level", _WIDTH, 318,
        says="A decision tree. If neither 16-bit dtype is fast on the machine: O0. If bf16 is: O4 "
        "by default, O5 if weights dominate. If only fp16 is: O1 by default, O2 if weights "
        "dominate.",
    )  # fmt: skip
    drawing.box(170, 8, 300, 54)
    drawing.text(320, 31, "Which 16-bit dtype is fast here?", "head", "middle")
    drawing.text(320, 50, "apex doctor measures it", "small muted", "middle")
    for x, label in ((68, "neither"), (257, "bf16"), (509, "only fp16")):
        _branch(drawing, 320, 62, x, 236 if label == "neither" else 118, label)
    for left, levels in ((134, ("O4", "O5")), (386, ("O1", "O2"))):
        middle = left + _QUESTION / 2
        drawing.box(left, 118, _QUESTION, 54)
        drawing.text(middle, 141, "What dominates the step?", "head", "middle")
        drawing.text(middle, 160, "activations, if you are not sure", "small muted", "middle")
        for level, label in zip(levels, ("activations", "weights"), strict=True):
            _branch(drawing, middle, 172, _LEAVES[level][0] + _LEAF / 2, 236, label)
    for level, (left, kind, lines) in _LEAVES.items():
        drawing.box(left, 236, _LEAF, 74, kind=kind)
        drawing.text(left + _LEAF / 2, 260, level, "head", "middle")
        for index, line in enumerate(lines):
            drawing.text(left + _LEAF / 2, 279 + 17 * index, line, "small", "middle")
    return drawing.render()


def _branch(drawing: Drawing, x0: float, y0: float, x: float, y: float, label: str) -> None:
    """Draws an arrow down, across and down, with its answer above the arrow's head."""
    turn = y0 + 18
    drawing.arrow([(x0, y0), (x0, turn), (x, turn), (x, y - 2)])
    drawing.text(x + 6, turn + 20, label, "small")
