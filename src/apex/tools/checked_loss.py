"""The user's loss function, with its result checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from apex.tools.errors import TargetError, place_of


class CheckedLoss:
    """A loss function that raises if its result is not one number with a gradient.

    Attributes:
        place: ``"file:line"`` of the user's function; empty if it has none in Python.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        """Wraps ``loss(model, batch)``."""
        self._loss = loss
        self.place = place_of(loss)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns the loss.

        Raises:
            TargetError: If it is no tensor, has several elements, or no gradient.
        """
        found = self._loss(model, batch)
        if not isinstance(found, Tensor):
            raise self._error(f"{type(found).__name__}; it must return the 0-d loss tensor")
        if found.numel() != 1:
            raise self._error(
                f"a tensor of shape {list(found.shape)}; it must return a 0-d tensor, such as the "
                "mean() of this one"
            )
        if not found.requires_grad:
            raise self._error(
                "a tensor without a gradient; compute it from the model's parameters, without "
                "detach(), item() or torch.no_grad()"
            )
        return found

    def _error(self, text: str) -> TargetError:
        place = f" ({self.place})" if self.place else ""
        return TargetError(f"loss(model, batch) returned {text}{place}.")
