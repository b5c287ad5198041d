"""Cells that keep their hidden state, and stacks of cells in one or two directions.

States persist between calls, with their graph: ``detach_hidden`` detaches them, ``reset_hidden``
sets them to zeros. A different batch size starts from zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from apex.RNN._bidirectional import bidirectionalRNN
from apex.RNN._cell import RNNCell
from apex.RNN._stacked import stackedRNN

__all__ = ["RNNCell", "bidirectionalRNN", "flatten_list", "is_iterable", "stackedRNN"]


def is_iterable(maybe_iterable: object) -> bool:
    """Returns whether it is a list or tuple."""
    return isinstance(maybe_iterable, list | tuple)


def flatten_list(tens_list: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns tensors of one shape stacked along a new first dimension; a tensor as it is."""
    return tens_list if isinstance(tens_list, Tensor) else torch.stack(list(tens_list))
