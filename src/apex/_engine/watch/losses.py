"""Losses with a static scale that are inf or NaN: nothing skips their steps."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from apex._core.project import TRACE
from apex._engine.scaler import Readback
from apex._torch.dispatch_modes import suspend_modes

_log = logging.getLogger("apex")


class Losses:
    """Checks a sample of a session's losses, without waiting for the device; logs once."""

    def __init__(self) -> None:
        """Starts without losses."""
        # None once one was inf or NaN.
        self._copies: Readback[int] | None = Readback()
        self._count = 0

    def check(self, loss_id: int, loss: Tensor) -> None:
        """Checks the first 32, and then one in 32: once the weights are NaN, each loss is."""
        if self._copies is None or type(loss) is not Tensor or loss.is_meta or not loss.numel():
            return
        self._count += 1
        if self._count > 32 and self._count % 32:
            return
        with suspend_modes():  # a trace would list these operators
            value = loss.detach() if loss.numel() == 1 else loss.detach().abs().max()
            self._copies.send(loss_id, value.reshape(1))
        for arrived_id, (number,) in self._copies.poll():
            if math.isfinite(number):
                continue
            self._copies = None
            _log.warning(
                f"Loss {arrived_id} is inf or NaN. Its scale is static, so amp skips no step. If "
                f"the gradients are NaN, the next step makes the weights NaN. {TRACE}.",
                extra={"any_rank": True},
            )
            return
