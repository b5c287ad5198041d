"""One layer that keeps its hidden state between calls."""

# ruff: noqa: A002 - apex's names

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RNNCell(nn.Module):
    """One recurrent layer: weights, hidden states and a cell function.

    Args:
        gate_multiplier: Rows of the weights per hidden feature: 4 for LSTM, 3 for GRU, otherwise 1.
        input_size: Number of input features.
        hidden_size: Number of hidden features.
        cell: Function of one step, such as those in `apex.RNN.cells`.
        n_hidden_states: Number of hidden states; the first is the output.
        bias: Whether the layer has biases.
        output_size: Number of output features after a projection; None means ``hidden_size``,
            without a projection.
    """

    __module__ = "apex.RNN.RNNBackend"  # the public name, which pickles store

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Callable[..., Any],
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        self.gate_multiplier = gate_multiplier
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.cell = cell
        self.bias = bias
        self.output_size = hidden_size if output_size is None else output_size
        self.gate_size = gate_multiplier * hidden_size
        self.n_hidden_states = n_hidden_states
        self.w_ih = nn.Parameter(torch.empty(self.gate_size, input_size))
        self.w_hh = nn.Parameter(torch.empty(self.gate_size, self.output_size))
        self._projects = self.output_size != hidden_size
        if self._projects:
            self.w_ho = nn.Parameter(torch.empty(self.output_size, hidden_size))
        self.b_ih = nn.Parameter(torch.empty(self.gate_size)) if bias else None
        self.b_hh = nn.Parameter(torch.empty(self.gate_size)) if bias else None
        self.hidden: list[Tensor | None] = [None] * n_hidden_states
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        """Returns a cell with the same options and new parameters."""
        return type(self)(
            self.gate_multiplier,
            new_input_size or self.input_size,
            self.hidden_size,
            self.cell,
            self.n_hidden_states,
            self.bias,
            self.output_size,
        )

    def reset_parameters(self, gain: float = 1) -> None:
        """Reinitializes all parameters uniformly within +-1/sqrt(hidden_size); ignores ``gain``."""
        del gain
        bound = 1.0 / math.sqrt(self.hidden_size)
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Creates zero states for a batch of ``bsz``; keeps states of that size.

        Moves kept states to the parameters' device and dtype.
        """
        for index, state in enumerate(self.hidden):
            if state is None or state.shape[0] != bsz:
                size = self.hidden_size if index else self.output_size
                self.hidden[index] = self.w_ih.new_zeros(bsz, size)
            else:
                self.hidden[index] = state.to(self.w_ih)

    def reset_hidden(self, bsz: int) -> None:
        """Resets the states to zeros for a batch of ``bsz``."""
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Detaches the states from their graph.

        Raises:
            RuntimeError: If there are no states yet.
        """
        if any(state is None for state in self.hidden):
            raise RuntimeError(
                "detach_hidden was called before the hidden states exist. Call the network or "
                "init_hidden(batch_size) first."
            )
        self.hidden = [state if state is None else state.detach() for state in self.hidden]

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Returns the new states, output first, for one step's input ``[batch, features]``."""
        self.init_hidden(input.shape[0])
        before = self.hidden[0] if self.n_hidden_states == 1 else self.hidden
        new = self.cell(input, before, *self._weights(), b_ih=self.b_ih, b_hh=self.b_hh)
        states = [new] if self.n_hidden_states == 1 else list(new)
        if self._projects:
            states[0] = F.linear(states[0], self.w_ho)
        self.hidden = list(states)
        return tuple(states)

    def _weights(self) -> tuple[Tensor, ...]:
        return self.w_ih, self.w_hh

    def extra_repr(self) -> str:
        """Returns sizes, cell and bias."""
        return f"{self.input_size}, {self.hidden_size}, cell={self.cell.__name__}, bias={self.bias}"
