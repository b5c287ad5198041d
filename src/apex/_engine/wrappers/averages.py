"""torch's ``AveragedModel``: its functions average in fp32, and refuse a model's 16-bit weights."""

from __future__ import annotations

from types import FrameType

from torch.optim.swa_utils import AveragedModel

_UPDATE = AveragedModel.update_parameters.__code__


def averages(reader: FrameType) -> bool:
    """Returns whether a frame reads a model's parameters in order to average them."""
    return reader.f_code is _UPDATE
