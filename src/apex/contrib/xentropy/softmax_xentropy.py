"""Softmax cross entropy under apex's name.

Source: Szegedy et al., "Rethinking the Inception Architecture", arXiv:1512.00567 (smoothing).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from apex._core.arguments import in_range
from apex._core.dtypes import is_low_precision
from apex._core.plain_function import PlainFunction


class SoftmaxCrossEntropyLoss(PlainFunction):
    """Cross entropy of each row of logits: ``-(1 - s) * log p[label] - s * mean(log p)``.

    Scripts call ``SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx)``.
    """

    @staticmethod
    def forward(
        ctx: object,
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Returns the losses, ``[N]``; the softmax is computed in fp32 or wider.

        Args:
            ctx: Ignored.
            logits: ``[N, classes]``.
            labels: Class indices, ``[N]``.
            smoothing: Share ``s`` of the target that is spread evenly over all classes, 0 to 1.
            padding_idx: Label of rows whose loss and gradient are zero; may be out of range.
            half_to_float: Whether losses of fp16 and bf16 logits are fp32 instead of their dtype.
        """
        in_range("smoothing", smoothing, most=1.0)
        fits = logits.dim() == 2 and labels.shape == logits.shape[:1]
        if not fits or labels.is_floating_point():
            raise ValueError(
                f"SoftmaxCrossEntropyLoss got logits of shape {list(logits.shape)} and labels of "
                f"{labels.dtype} and shape {list(labels.shape)}; it takes [N, classes] and class "
                "indices [N]. Flatten first: logits.view(-1, classes), labels.view(-1)."
            )
        wide = torch.float32 if is_low_precision(logits) else logits.dtype
        log_probs = F.log_softmax(logits, dim=-1, dtype=wide)
        losses = F.nll_loss(log_probs, labels.long(), ignore_index=padding_idx, reduction="none")
        if smoothing:
            padding = labels == padding_idx
            spread = log_probs.mean(dim=-1).neg().masked_fill(padding, 0.0)
            losses = losses * (1.0 - smoothing) + spread * smoothing
        return losses if half_to_float else losses.to(logits.dtype)
