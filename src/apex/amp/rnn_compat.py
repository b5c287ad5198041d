"""Which kind of RNN torch has, under apex's name; op casts reach them without a shim."""

from __future__ import annotations

from apex import _unavailable

_RNN = "torch's RNNs as they are: op casts reach them"

__getattr__ = _unavailable.names_instead(
    __name__, {"VariableFunctionsShim": _RNN, "whitelist_rnn_cells": _RNN}
)

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Returns False: torch's RNNs have not been autograd backends since 1.0."""
    return False
