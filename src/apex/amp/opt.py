"""The optimizer that ``handle.wrap_optimizer`` returns, in apex's older API."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from apex._core import arguments
from apex._core.scale import ScaleRule
from apex._engine.scaler import scaler_for
from apex._torch.dynamo import untraced, untraced_frame
from apex.amp.scaler import LossScaler as LossScaler  # scripts import it from here

if TYPE_CHECKING:
    from apex.amp.handle import AmpHandle


class OptimWrapper:
    """An optimizer with ``scale_loss``; delegates everything else to the optimizer.

    With several losses, the n-th ``scale_loss`` block after a step uses the n-th loss scale; an
    overflow in any of them skips the step.
    """

    def __init__(self, optimizer: Any, amp_handle: AmpHandle, num_loss: int) -> None:
        """Wraps ``optimizer``; under a ``NoOpHandle``, losses are not scaled."""
        num_loss = arguments.integer("num_loss", num_loss, least=1)
        self._optimizer, self._handle = optimizer, amp_handle
        self._loss_index = 0
        amp_handle._bind(optimizer)
        scale, rule = amp_handle._loss_scale, ScaleRule(ceiling=2.0**24)
        self._loss_scaler = [scaler_for(scale, rule, loss_id=index) for index in range(num_loss)]

    @untraced
    def scale_loss(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """Returns the context of the next loss's backward pass.

        Raises:
            RuntimeError: If there are more blocks between two steps than ``num_loss``.
        """
        if self._handle._session is None:
            return nullcontext(loss)
        count = len(self._loss_scaler)
        if self._loss_index >= count:
            raise RuntimeError(
                f"optimizer.scale_loss was called more than {count} times without a step. Pass "
                "num_loss=... to handle.wrap_optimizer, one for each loss."
            )
        arguments.loss("optimizer.scale_loss", loss)
        scaler = self._loss_scaler[self._loss_index]
        self._loss_index += 1
        return self._handle._backward_pass(loss, self._optimizer, scaler)

    @untraced_frame
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, unless a gradient of any loss overflowed."""
        self._loss_index = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients."""
        self._optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> Any:
        """Returns the optimizer's state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizer's state."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters."""
        self._optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
