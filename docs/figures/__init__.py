"""The figures of the pages that have one, drawn from the package's own data.

``python -m docs.figures`` writes them to ``docs/_static/figures``; a test compares these files with
newly drawn ones.
"""

from __future__ import annotations

from pathlib import Path

from docs.figures import (
    exactness,
    levels,
    loss_scaling,
    master_weights,
    memory,
    op_policy,
    which_level,
)

FOLDER = Path(__file__).parents[1] / "_static" / "figures"

FIGURES = {
    "which_level": which_level.draw,
    "levels": levels.draw,
    "op_policy": op_policy.draw,
    "master_weights": master_weights.draw,
    "loss_scaling": loss_scaling.draw,
    "exactness": exactness.draw,
    "memory": memory.draw,
}
"""Functions that return the text of an SVG, by the name of its file."""


def path(name: str) -> Path:
    """Returns the path of the figure ``name``."""
    return FOLDER / f"{name}.svg"
