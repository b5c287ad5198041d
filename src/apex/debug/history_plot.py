"""Plots a history: loss scales with overflows marked, and gradient norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from apex.debug.history import Pass

OVERFLOW = "tab:red"


def figure(passes: Sequence[Pass]) -> Figure:
    """Returns the figure, for ``savefig`` or a notebook; opens no window.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "amp.debug.History.plot needs matplotlib: pip install 'apex-amp[plot]'. "
            "history.to_json() has the same data."
        ) from error
    with_norms = any(item.grad_norm is not None for item in passes)
    result = Figure(figsize=(9, 5.5 if with_norms else 3), layout="constrained")
    panels: Any = result.subplots(1 + with_norms, 1, sharex=True, squeeze=False)[:, 0]
    _scales(panels[0], passes)
    if with_norms:
        _norms(panels[1], passes)
    panels[-1].set_xlabel("backward pass")
    return result


def _scales(panel: Any, passes: Sequence[Pass]) -> None:
    losses = sorted({item.loss_id for item in passes})
    for loss_id in losses:
        own = [item for item in passes if item.loss_id == loss_id]
        panel.step(
            [item.index for item in own],
            [item.loss_scale for item in own],
            where="post",
            label=f"loss {loss_id}",
        )
    over = [item for item in passes if item.overflow]
    if over:
        panel.plot(
            [item.index for item in over],
            [item.loss_scale for item in over],
            "v",
            color=OVERFLOW,
            label=f"overflow, step skipped ({len(over)})",
        )
    panel.set_yscale("log", base=2)
    panel.set_ylabel("loss scale")
    panel.grid(alpha=0.3)
    if over or len(losses) > 1:
        panel.legend()


def _norms(panel: Any, passes: Sequence[Pass]) -> None:
    for loss_id in sorted({item.loss_id for item in passes}):
        own = [(i.index, i.grad_norm) for i in passes if i.loss_id == loss_id]
        known = [(index, n) for index, n in own if n is not None and math.isfinite(n) and n > 0]
        if known:
            panel.plot(*zip(*known, strict=True), label=f"loss {loss_id}")
    panel.set_yscale("log")
    panel.set_ylabel("gradient norm")
    panel.grid(alpha=0.3)
