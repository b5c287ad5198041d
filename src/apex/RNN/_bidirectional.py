"""Two stacks that process a sequence in opposite directions."""

# ruff: noqa: A002, N801, N803 - apex's names

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from apex.RNN._cell import RNNCell
from apex.RNN._stacked import Hiddens, Stateful, stackedRNN


class bidirectionalRNN(Stateful):
    """Two stacks, one forward and one backward in time; their outputs are concatenated.

    Arguments are those of `stackedRNN`, except that ``inputRNN`` is a single cell. As in apex, the
    state dict contains every parameter twice: under ``fwd`` or ``bckwrd``, and under ``rnns``.
    """

    __module__ = "apex.RNN.RNNBackend"  # the public name, which pickles store

    def __init__(
        self,
        inputRNN: RNNCell,
        num_layers: int = 1,
        dropout: float = 0,
        *,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.fwd = stackedRNN(inputRNN, num_layers, dropout, batch_first=batch_first)
        back = inputRNN.new_like()
        self.bckwrd = stackedRNN(back, num_layers, dropout, batch_first=batch_first)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(self, input: Tensor, collect_hidden: bool = False) -> tuple[Tensor, Hiddens]:
        """Runs both stacks and concatenates their features; arguments are those of `stackedRNN`."""
        ahead, ahead_states = self.fwd(input, collect_hidden=collect_hidden)
        back, back_states = self.bckwrd(input, collect_hidden=collect_hidden, reverse=True)
        pairs = zip(ahead_states, back_states, strict=True)
        return torch.cat([ahead, back], -1), tuple(itertools.starmap(_side_by_side, pairs))


def _side_by_side(ahead: Any, back: Any) -> Any:
    if isinstance(ahead, Tensor):
        return torch.cat([ahead, back], -1)
    return [torch.cat(pair, -1) for pair in zip(ahead, back, strict=True)]
