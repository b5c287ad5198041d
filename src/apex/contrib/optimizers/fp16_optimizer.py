"""The ``FP16_Optimizer`` of apex's deprecated optimizers."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from apex import optimizers


class FP16_Optimizer(optimizers.FP16_Optimizer):  # noqa: N801 - apex's name
    """Like :class:`apex.optimizers.FP16_Optimizer`, but saves masters one by one."""

    _masters_key: ClassVar[str] = "fp32_groups"

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        """The fp32 masters, or the fp32 parameters themselves, per group."""
        return [group["params"] for group in self.optimizer.param_groups]

    def _saved_masters(self) -> dict[str, Any]:
        groups = [[param.detach() for param in params] for params in self.fp32_groups]
        return {self._masters_key: groups}

    def _masters_from(self, state_dict: dict[str, Any]) -> list[Tensor]:
        groups = state_dict[self._masters_key]
        given = [[tuple(tensor.shape) for tensor in tensors] for tensors in groups]
        expected = [[tuple(param.shape) for param in params] for params in self.fp32_groups]
        if given != expected:
            raise ValueError(
                f"The state dict holds masters of shapes {given}; this optimizer's groups have "
                f"{expected}. Build model and groups as they were when it was saved."
            )
        return [tensor for tensors in groups for tensor in tensors]
