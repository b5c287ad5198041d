"""The networks: stacks of one kind of cell, in one or two directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from apex.RNN.cells import GRUCell, LSTMCell, ReLUCell, TanhCell, mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

Network = stackedRNN | bidirectionalRNN


def toRNNBackend(  # noqa: N802 - apex's name
    inputRNN: RNNCell,  # noqa: N803 - apex's name
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
) -> Network:
    """Returns a network with ``inputRNN`` as its first layer and similar further layers."""
    network = bidirectionalRNN if bidirectional else stackedRNN
    return network(inputRNN, num_layers, dropout=dropout)


def _network(
    cell: Callable[..., RNNCell],
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> Network:
    """Returns a network of cells.

    Args:
        cell: Creates the first cell; the networks below differ in it alone.
        input_size: Number of input features.
        hidden_size: Number of features of the cell state.
        num_layers: Number of layers.
        bias: Whether cells have biases.
        batch_first: Must be False: inputs and outputs are ``[steps, batch, features]``.
        dropout: Dropout probability between layers, in training.
        bidirectional: Whether a second stack processes the steps in reverse; the outputs are
            concatenated.
        output_size: Number of features of output and hidden state after a projection; None means
            ``hidden_size``, without a projection.
    """
    if batch_first:
        raise ValueError(
            "apex.RNN got batch_first=True, which apex ignored: inputs are [steps, batch, "
            "features]. Omit it, and pass x.transpose(0, 1) if the batch comes first."
        )
    first = cell(input_size, hidden_size, bias=bias, output_size=output_size)
    return toRNNBackend(first, num_layers, bidirectional, dropout)


LSTM = partial(_network, partial(RNNCell, 4, cell=LSTMCell))
"""Returns a long short-term memory network."""

GRU = partial(_network, partial(RNNCell, 3, cell=GRUCell, n_hidden_states=1))
"""Returns a network of gated recurrent units."""

ReLU = partial(_network, partial(RNNCell, 1, cell=ReLUCell, n_hidden_states=1))
"""Returns an Elman network with ReLU activation."""

Tanh = partial(_network, partial(RNNCell, 1, cell=TanhCell, n_hidden_states=1))
"""Returns an Elman network with tanh activation."""

mLSTM = partial(_network, mLSTMRNNCell)  # noqa: N816
"""Returns a multiplicative LSTM network: Krause et al., arXiv:1609.07959."""
