"""apex's RNN compatibility names; op casts apply to torch's RNNs without a shim."""

from __future__ import annotations

from apex import _unavailable

_RNN = "torch's RNNs, to which op casts apply directly"

__getattr__ = _unavailable.names_instead(
    __name__, {"VariableFunctionsShim": _RNN, "whitelist_rnn_cells": _RNN}
)

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Returns False: torch 1.0 removed the RNN backends that apex checks for."""
    return False
