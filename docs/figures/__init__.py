"""The figures of the concept pages, drawn from what the package itself says.

``python -m docs.figures`` writes them to ``docs/_static/figures``; a test holds these against what
is drawn anew.
"""

from __future__ import annotations

from pathlib import Path

from docs.figures import devices, exactness, levels, loss_scaling, master_weights, op_policy

FOLDER = Path(__file__).parents[1] / "_static" / "figures"

FIGURES = {
    "levels": levels.draw,
    "op_policy": op_policy.draw,
    "master_weights": master_weights.draw,
    "loss_scaling": loss_scaling.draw,
    "exactness": exactness.draw,
    "devices": devices.draw,
}
"""Functions that return the text of an SVG, by the name of its file."""


def path(name: str) -> Path:
    """Returns where the figure ``name`` is kept."""
    return FOLDER / f"{name}.svg"
