"""What averages a model's weights: torch's ``AveragedModel``, and callbacks of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from torch import Tensor

from apex._engine import master_table

_CALLBACKS = ("callbacks.weight_averaging", "callbacks.stochastic_weight_avg")
"""Lightning's modules, which also write the averages into the model."""


def view_for(reader: FrameType, method: str) -> Callable[[Tensor], Tensor] | None:
    """Returns what replaces each tensor that a model's method yields, for a frame that averages.

    ``None`` for other frames and methods.
    """
    if method not in ("parameters", "buffers"):
        return None
    module = str(reader.f_globals.get("__name__"))
    if module == "torch.optim.swa_utils":
        return master_table.in_fp32
    if module.endswith(_CALLBACKS):
        return master_table.master_of
    return None
