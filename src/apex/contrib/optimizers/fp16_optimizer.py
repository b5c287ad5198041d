"""The ``FP16_Optimizer`` of apex's deprecated optimizers."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from apex import optimizers


class FP16_Optimizer(optimizers.FP16_Optimizer):  # noqa: N801 - apex's name
    """Like :class:`apex.optimizers.FP16_Optimizer`, but saves masters one by one."""

    _masters_key: ClassVar[str] = "fp32_groups"

    @property
    def fp32_groups(self) -> list[list[nn.Parameter]]:
        """The fp32 masters, or the fp32 parameters themselves, per group."""
        return self._stepped()

    def _saved_masters(self) -> list[Any]:
        return [[param.detach() for param in params] for params in self.fp32_groups]

    def _by_parameter(self, saved: list[Any]) -> list[list[Tensor]]:
        return saved
