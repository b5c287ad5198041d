"""Softmax cross entropy under apex's name: an autograd function's ``apply``, and a module.

Source: Szegedy et al., "Rethinking the Inception Architecture", arXiv:1512.00567 (smoothing).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex._core.arguments import in_range
from apex._core.dtypes import LOW_PRECISION


class _WithApply(type):
    """Gives a class autograd's ``apply``, while its instances keep ``nn.Module.apply``."""

    @property
    def apply(cls) -> Callable[..., Tensor]:
        """Returns the loss with the signature of apex's autograd function."""
        return _row_losses


class SoftmaxCrossEntropyLoss(nn.Module, metaclass=_WithApply):
    """Cross entropy of each row of logits: ``-(1 - s) * log p[label] - s * mean(log p)``.

    The softmax is computed in fp32 or wider. Both forms return losses of shape ``[N]``:

    - ``SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx, half_to_float)``
    - ``SoftmaxCrossEntropyLoss(smoothing, padding_idx, half_to_float)(logits, labels)``

    Args:
        smoothing: Share ``s`` of the target that is spread evenly over all classes, from 0 to 1.
        padding_idx: Label of rows whose loss and gradient are zero; may be out of range.
        half_to_float: Whether losses of fp16 and bf16 logits are fp32 instead of the logits' dtype.
    """

    def __init__(
        self, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> None:
        super().__init__()
        in_range("smoothing", smoothing, most=1.0)
        self.smoothing = smoothing
        self.padding_idx = padding_idx
        self.half_to_float = half_to_float

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the losses, ``[N]``, of logits ``[N, classes]`` and integer labels ``[N]``."""
        return _row_losses(logits, labels, self.smoothing, self.padding_idx, self.half_to_float)


def _row_losses(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    padding_idx: int = 0,
    half_to_float: bool = False,
) -> Tensor:
    """Returns the losses; arguments are those of `SoftmaxCrossEntropyLoss`."""
    in_range("smoothing", smoothing, most=1.0)
    _check_tensors(logits, labels)
    given = logits.dtype
    wide = torch.float32 if given in LOW_PRECISION else given
    log_probs = F.log_softmax(logits, dim=-1, dtype=wide)
    losses = F.nll_loss(log_probs, labels.long(), ignore_index=padding_idx, reduction="none")
    if smoothing:
        padding = labels == padding_idx
        spread = log_probs.mean(dim=-1).neg().masked_fill(padding, 0.0)
        losses = losses * (1.0 - smoothing) + spread * smoothing
    return losses if half_to_float else losses.to(given)


def _check_tensors(logits: Tensor, labels: Tensor) -> None:
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"SoftmaxCrossEntropyLoss got logits of shape {list(logits.shape)} and labels of shape "
            f"{list(labels.shape)}; it takes [N, classes] and [N]. Flatten other shapes first: "
            "logits.view(-1, classes), labels.view(-1)."
        )
    if labels.is_floating_point():
        raise TypeError(
            f"SoftmaxCrossEntropyLoss got labels of {labels.dtype}; they must be class indices."
        )
