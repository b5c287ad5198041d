"""The networks: stacks of one kind of cell, in one or two directions."""

from __future__ import annotations

from apex.RNN.cells import GRUCell, LSTMCell, ReLUCell, TanhCell, mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "toRNNBackend"]

Network = stackedRNN | bidirectionalRNN


def toRNNBackend(  # noqa: N802 - apex's name
    inputRNN: RNNCell,  # noqa: N803 - apex's name
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
    batch_first: bool = False,
) -> Network:
    """Returns a network with ``inputRNN`` as its first layer and similar further layers."""
    network = bidirectionalRNN if bidirectional else stackedRNN
    return network(inputRNN, num_layers, dropout=dropout, batch_first=batch_first)


def LSTM(  # noqa: N802 - apex's name
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> Network:
    """Returns a long short-term memory network.

    Args:
        input_size: Number of input features.
        hidden_size: Number of features of the cell state.
        num_layers: Number of layers.
        bias: Whether cells have biases.
        batch_first: Whether inputs and outputs are ``[batch, steps, features]`` instead of
            ``[steps, batch, features]``.
        dropout: Dropout probability between layers, in training.
        bidirectional: Whether a second stack processes the steps in reverse; the outputs are
            concatenated.
        output_size: Number of features of output and hidden state after a projection; None means
            ``hidden_size``, without a projection.
    """
    cell = RNNCell(4, input_size, hidden_size, LSTMCell, 2, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def GRU(  # noqa: N802 - apex's name
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> Network:
    """Returns a network of gated recurrent units; arguments are those of `LSTM`.

    Raises:
        ValueError: If ``output_size`` is not the hidden size.
    """
    if output_size not in (None, hidden_size):
        raise ValueError(
            f"GRU got output_size={output_size} with hidden_size={hidden_size}; its new state is "
            "a mean of the old state and a candidate, so their sizes are equal. Project the output."
        )
    cell = RNNCell(3, input_size, hidden_size, GRUCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def ReLU(  # noqa: N802 - apex's name
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> Network:
    """Returns an Elman network with ReLU activation; arguments are those of `LSTM`."""
    cell = RNNCell(1, input_size, hidden_size, ReLUCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def Tanh(  # noqa: N802 - apex's name
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> Network:
    """Returns an Elman network with tanh activation; arguments are those of `LSTM`."""
    cell = RNNCell(1, input_size, hidden_size, TanhCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def mLSTM(  # noqa: N802 - apex's name
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> Network:
    """Returns a multiplicative LSTM network; arguments are those of `LSTM`.

    Source: Krause et al., "Multiplicative LSTM for sequence modelling", arXiv:1609.07959.
    """
    cell = mLSTMRNNCell(input_size, hidden_size, bias=bias, output_size=output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)
