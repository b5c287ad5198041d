"""Draws every figure: ``python -m docs.figures``."""

from docs.figures import FIGURES, FOLDER, path

FOLDER.mkdir(parents=True, exist_ok=True)
for name, draw in FIGURES.items():
    path(name).write_text(draw(), encoding="utf-8")
    print(path(name))
