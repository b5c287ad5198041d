"""Which kind of RNN torch has, under apex's name; op casts reach them without a shim."""

from __future__ import annotations

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Returns False: torch's RNNs have not been autograd backends since 1.0."""
    return False
