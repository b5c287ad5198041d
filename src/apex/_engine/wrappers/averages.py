"""What averages a model's weights: torch's ``AveragedModel``, and callbacks of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from torch import Tensor

from apex._engine.masters import MasterTable

_View = Callable[[MasterTable, Tensor], Tensor]

_VIEWS: dict[object, _View] = {
    "torch.optim.swa_utils": MasterTable.in_fp32,
    # These also write the averages into the model.
    "lightning.pytorch.callbacks.weight_averaging": MasterTable.master_of,
    "lightning.pytorch.callbacks.stochastic_weight_avg": MasterTable.master_of,
    "pytorch_lightning.callbacks.weight_averaging": MasterTable.master_of,
    "pytorch_lightning.callbacks.stochastic_weight_avg": MasterTable.master_of,
}
"""By module: what its code gets for a model's tensor."""


def view_for(reader: FrameType) -> _View | None:
    """Returns what a frame that averages gets for a model's tensor; ``None`` for other frames."""
    return _VIEWS.get(reader.f_globals.get("__name__"))
