"""apex's RNN compatibility names; op casts apply to torch's RNNs without a shim."""

from __future__ import annotations

from apex import _unavailable

_NAMES = "RNN_NAMES", "VariableFunctionsShim", "has_old_rnns", "whitelist_rnn_cells"

__getattr__ = _unavailable.names_instead(
    __name__, dict.fromkeys(_NAMES, "torch's RNNs, to which op casts apply directly")
)
