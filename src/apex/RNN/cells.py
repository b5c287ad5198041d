"""Functions for one step of each kind of cell, from ``(input, hidden, weights, biases)``.

``hidden`` is a tensor for cells with one state, and a list for other cells. The size of the output
is the number of columns of ``w_hh``, which may differ from the size of the cell state.
"""

# ruff: noqa: A002, N802 - apex's names

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apex.RNN.RNNBackend import RNNCell, new_parameter

Bias = Tensor | None
States = Sequence[Tensor]


def _gates(
    input: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Bias = None, b_hh: Bias = None
) -> Tensor:
    return F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)


def LSTMCell(
    input: Tensor, hidden: States, *weights: Tensor, **biases: Any
) -> tuple[Tensor, Tensor]:
    """Returns output and cell state of a long short-term memory cell, ``[batch, hidden]`` each."""
    output, state = hidden
    gates = _gates(input, output, *weights, **biases).chunk(4, dim=-1)
    input_gate, forget_gate, candidate, output_gate = gates
    kept = forget_gate.sigmoid() * state
    state = kept + input_gate.sigmoid() * candidate.tanh()
    return output_gate.sigmoid() * state.tanh(), state


GRUCell = torch.gru_cell
"""Returns the state of a gated recurrent unit, ``[batch, hidden]``."""


def _elman(activation: Callable[[Tensor], Tensor], *operands: Tensor, **biases: Any) -> Tensor:
    return activation(_gates(*operands, **biases))


ReLUCell = partial(_elman, torch.relu)
"""Returns the state of an Elman cell with ReLU, ``[batch, hidden]``."""

TanhCell = partial(_elman, torch.tanh)
"""Returns the state of an Elman cell with tanh, ``[batch, hidden]``."""


def mLSTMCell(
    input: Tensor,
    hidden: States,
    w_ih: Tensor,
    w_hh: Tensor,
    w_mih: Tensor,
    w_mhh: Tensor,
    b_ih: Bias = None,
    b_hh: Bias = None,
) -> tuple[Tensor, Tensor]:
    """Returns output and cell state of a multiplicative LSTM cell.

    The LSTM receives ``(w_mih x) * (w_mhh h)`` instead of the output ``h``.
    """
    output, state = hidden
    mixed = F.linear(input, w_mih) * F.linear(output, w_mhh)
    return LSTMCell(input, [mixed, state], w_ih, w_hh, b_ih=b_ih, b_hh=b_hh)


class mLSTMRNNCell(RNNCell):  # noqa: N801
    """A multiplicative LSTM cell that keeps its states; takes the arguments of `RNNCell`."""

    weights = ("w_ih", "w_hh", "w_mih", "w_mhh")

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = False, output_size: int | None = None
    ) -> None:
        # An LSTM has four gates and two hidden states.
        super().__init__(4, input_size, hidden_size, mLSTMCell, 2, bias, output_size)
        self.w_mih = new_parameter(self.output_size, self.input_size)
        self.w_mhh = new_parameter(self.output_size, self.output_size)
        self.reset_parameters()
