"""The ``FP16_Optimizer`` of apex's deprecated optimizers."""

from __future__ import annotations

from torch import nn

from apex.fp16_utils.master_wrapper import MasterWrapper


class FP16_Optimizer(MasterWrapper):  # noqa: N801 - apex's name
    """Like :class:`apex.optimizers.FP16_Optimizer`, but saves masters one by one."""

    _masters_key = "fp32_groups"

    @property
    def fp32_groups(self) -> list[list[nn.Parameter]]:
        """The fp32 masters, or the fp32 parameters themselves, per group."""
        return self._stepped()
