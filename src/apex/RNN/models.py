"""The networks: stacks of one kind of cell, in one or two directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from apex.RNN.cells import GRUCell, LSTMCell, ReLUCell, TanhCell, mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "toRNNBackend"]

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


def _network(name: str, kind: str, cell: Callable[..., RNNCell]) -> Callable[..., Network]:
    """Returns the function ``name``, which creates networks of a cell."""

    def make(
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        output_size: int | None = None,
    ) -> Network:
        if batch_first:
            raise ValueError(
                f"{name} got batch_first=True, which apex ignored: inputs are [steps, batch, "
                "features]. Omit it, and pass x.transpose(0, 1) if the batch comes first."
            )
        first = cell(input_size, hidden_size, bias=bias, output_size=output_size)
        return toRNNBackend(first, num_layers, bidirectional, dropout)

    make.__name__ = name
    make.__qualname__ = name
    make.__doc__ = f"""Returns {kind}.

    Args:
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
    return make


LSTM = _network(
    "LSTM",
    "a long short-term memory network",
    partial(RNNCell, 4, cell=LSTMCell, n_hidden_states=2),
)
GRU = _network(
    "GRU",
    "a network of gated recurrent units",
    partial(RNNCell, 3, cell=GRUCell, n_hidden_states=1),
)
ReLU = _network(
    "ReLU",
    "an Elman network with ReLU activation",
    partial(RNNCell, 1, cell=ReLUCell, n_hidden_states=1),
)
Tanh = _network(
    "Tanh",
    "an Elman network with tanh activation",
    partial(RNNCell, 1, cell=TanhCell, n_hidden_states=1),
)
# Krause et al., "Multiplicative LSTM for sequence modelling", arXiv:1609.07959.
mLSTM = _network("mLSTM", "a multiplicative LSTM network", mLSTMRNNCell)  # noqa: N816
