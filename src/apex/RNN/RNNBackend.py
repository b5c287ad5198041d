"""Cells that keep their hidden state, and stacks of cells in one or two directions.

States persist between calls, with their graph. ``detach_hidden`` detaches the states,
``reset_hidden`` sets them to zeros, and so does a different batch size.
"""

# ruff: noqa: A001, A002, N801, N803 - apex's names

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import _unavailable

__getattr__ = _unavailable.names_instead(
    __name__, {"flatten_list": "torch.stack", "is_iterable": "isinstance"}
)


def new_parameter(*shape: int) -> nn.Parameter:
    """Returns a parameter without values."""
    return nn.Parameter(torch.empty(shape))


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

    Attributes:
        weights: Names of the weights, in the order of the cell function's arguments.
    """

    weights: Sequence[str] = ("w_ih", "w_hh")

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
        self.output_size = output_size or hidden_size
        self.n_hidden_states = n_hidden_states
        rows = gate_multiplier * hidden_size
        self.w_ih = new_parameter(rows, input_size)
        self.w_hh = new_parameter(rows, self.output_size)
        if self.output_size != hidden_size:
            self.w_ho = new_parameter(self.output_size, hidden_size)
        self.b_ih = new_parameter(rows) if bias else None
        self.b_hh = new_parameter(rows) if bias else None
        # Empty until the first call, which knows the batch size.
        self.hidden: list[Tensor] = []
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        """Returns a cell with the same options and new parameters."""
        names = inspect.signature(type(self)).parameters
        options = {name: getattr(self, name) for name in names}  # kept under the same names
        options["input_size"] = new_input_size or self.input_size
        return type(self)(**options)

    def reset_parameters(self, gain: float = 1) -> None:
        """Draws all parameters uniformly from +-1/sqrt(hidden_size); ignores ``gain``."""
        bound = self.hidden_size**-0.5
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Creates zero states for a batch of ``bsz``; keeps existing states of this batch size.

        Moves kept states to the parameters' device and dtype.
        """
        if not self.hidden or len(self.hidden[0]) != bsz:
            self.reset_hidden(bsz)
        self.hidden = [state.to(self.w_ih) for state in self.hidden]

    def reset_hidden(self, bsz: int) -> None:
        """Resets the states to zeros for a batch of ``bsz``."""
        sizes = [self.output_size] + [self.hidden_size] * (self.n_hidden_states - 1)
        self.hidden = [self.w_ih.new_zeros(bsz, size) for size in sizes]

    def detach_hidden(self) -> None:
        """Detaches the states from their graph.

        Raises:
            RuntimeError: If there are no states yet.
        """
        if not self.hidden:
            raise RuntimeError(
                "detach_hidden was called before the hidden states exist. Call the network or "
                "init_hidden(batch_size) first."
            )
        self.hidden = [state.detach() for state in self.hidden]

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Returns the new states, output first, for one step's input ``[batch, features]``."""
        self.init_hidden(input.shape[0])
        hidden: Any = self.hidden if self.n_hidden_states > 1 else self.hidden[0]
        weights = [getattr(self, name) for name in self.weights]
        result = self.cell(input, hidden, *weights, b_ih=self.b_ih, b_hh=self.b_hh)
        states = [result] if isinstance(result, Tensor) else list(result)
        if self.output_size != self.hidden_size:
            states[0] = F.linear(states[0], self.w_ho)
        self.hidden = states
        return tuple(states)


class Stateful(nn.Module):
    """A module whose ``rnns`` keep hidden states."""

    rnns: Any  # a ModuleList of cells or of stacks

    def reset_parameters(self) -> None:
        """Reinitializes all parameters."""
        for rnn in self.rnns:
            rnn.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Creates zero states for a batch of ``bsz``; keeps existing states of this batch size."""
        for rnn in self.rnns:
            rnn.init_hidden(bsz)

    init_inference = init_hidden

    def reset_hidden(self, bsz: int) -> None:
        """Resets all states to zeros for a batch of ``bsz``."""
        for rnn in self.rnns:
            rnn.reset_hidden(bsz)

    def detach_hidden(self) -> None:
        """Detaches all states from their graph."""
        for rnn in self.rnns:
            rnn.detach_hidden()


class stackedRNN(Stateful):
    """A stack of cells, run step by step.

    Args:
        inputRNN: The first cell, whose options the other cells get, or a list of all cells.
        num_layers: Number of cells.
        dropout: Dropout probability between layers, in training.

    Raises:
        ValueError: If ``inputRNN`` is neither a cell nor a list of ``num_layers`` cells.
    """

    def __init__(
        self, inputRNN: RNNCell | list[RNNCell], num_layers: int = 1, dropout: float = 0
    ) -> None:
        super().__init__()
        cells: Any = inputRNN
        if isinstance(inputRNN, RNNCell):
            others = [inputRNN.new_like(inputRNN.output_size) for _ in range(num_layers - 1)]
            cells = [inputRNN, *others]
        if not isinstance(cells, list) or len(cells) != num_layers:
            raise ValueError(
                f"stackedRNN got {inputRNN} for {num_layers} layers; it takes at least one layer, "
                f"and an RNNCell or a list of {num_layers}."
            )
        self.dropout = dropout
        self.rnns = nn.ModuleList(cells)
        self.nLayers = num_layers

    def forward(
        self, input: Tensor, collect_hidden: bool = False, reverse: bool = False
    ) -> tuple[Tensor, Any]:
        """Runs the cells over all steps.

        Args:
            input: ``[steps, batch, features]``.
            collect_hidden: Whether to return the states of every step instead of only the last.
            reverse: Whether to process the steps from last to first.

        Returns:
            Outputs ``[steps, batch, output_size]`` in the input's order, and one tensor
            ``[layers, batch, features]`` per hidden state; with ``collect_hidden``, a list of
            tensors, one per step.

        Raises:
            ValueError: If the input has another number of dimensions, or no steps.
        """
        if input.dim() != 3 or not len(input):
            raise ValueError(
                f"RNN got an input of shape {list(input.shape)}; it takes [steps, batch, "
                f"{self.rnns[0].input_size}] with at least one step."
            )
        steps = input.flip(0) if reverse else input
        states_by_step = [self._step(step) for step in steps]
        last_states = states_by_step[-1]  # of the step that ran last, also in reverse
        if reverse:
            states_by_step.reverse()
        output = torch.stack([states[0][-1] for states in states_by_step])
        if not collect_hidden:
            return output, last_states
        # For every hidden state, the list of its values after each step.
        return output, [*map(list, zip(*states_by_step, strict=True))]

    def _step(self, input: Tensor) -> list[Tensor]:
        """Returns ``[layers, batch, features]`` of each hidden state after one step."""
        layers: list[Any] = []
        for cell in self.rnns:
            if layers:
                input = F.dropout(input, self.dropout, self.training)
            layers.append(cell(input))
            input = layers[-1][0]
        return [torch.stack(states) for states in zip(*layers, strict=True)]


class bidirectionalRNN(Stateful):
    """Two stacks, one forward and one backward in time; their outputs are concatenated.

    Takes the arguments of `stackedRNN`, except that ``inputRNN`` is a single cell. As in apex, the
    state dict contains every parameter twice: under ``fwd`` or ``bckwrd``, and under ``rnns``.
    """

    def __init__(self, inputRNN: RNNCell, num_layers: int = 1, dropout: float = 0) -> None:
        super().__init__()
        self.dropout = dropout
        self.fwd = stackedRNN(inputRNN, num_layers, dropout)
        self.bckwrd = stackedRNN(inputRNN.new_like(), num_layers, dropout)
        # For the methods of `Stateful`.
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(self, input: Tensor, collect_hidden: bool = False) -> tuple[Tensor, Any]:
        """Runs both stacks and concatenates their features; for arguments, see `stackedRNN`."""
        forward = self.fwd(input, collect_hidden)
        reverse = self.bckwrd(input, collect_hidden, reverse=True)
        output, states = _concatenated(forward, reverse)
        return output, tuple(states)


def _concatenated(forward: Any, reverse: Any) -> Any:
    """Concatenates the features of both directions; accepts tensors, or nested lists of them."""
    if isinstance(forward, Tensor):
        return torch.cat([forward, reverse], -1)
    return [*map(_concatenated, forward, reverse)]
