"""The loss scales of one optimizer; amp's own functions cover the newest session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apex._engine.optimizer.subclass import prepared_state
from apex._engine.scaler import Scaler
from apex.amp import scaler_states
from apex.amp.optimizers import unwrap


def is_prepared(optimizer: Any) -> bool:
    """Returns whether ``amp.initialize`` has prepared this optimizer."""
    return prepared_state(unwrap(optimizer)) is not None


def state_dict(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Returns the scales of the ``initialize`` call that prepared ``optimizer``.

    The format equals ``amp.state_dict()`` with a single ``initialize`` call; empty if amp has
    not prepared the optimizer.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> state_dict(optimizer)
        {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    return dict(scaler_states.entries(_scalers(optimizer)))


def load_state_dict(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Sets the scales of a prepared optimizer from :func:`state_dict`'s result.

    A state without scales (saved with amp disabled, or before the first iteration) changes nothing.
    If amp is disabled now, no state changes anything. Entries that do not apply (a dynamic scale
    for a static scaler, or the reverse) are skipped. A log message reports it, unless one of the
    two scales is 1. If the number of scales differs, the first ones are loaded, with a warning.

    Raises:
        RuntimeError: If a key is unexpected or a value is invalid; nothing changes in this case.
    """
    scalers = _scalers(optimizer)
    states = scaler_states.parsed(state_dict)
    if scalers and states:
        scaler_states.set_scalers(scalers, states)


def _scalers(optimizer: Any) -> list[Scaler]:
    prepared = prepared_state(unwrap(optimizer))
    return [] if prepared is None else prepared.session.scalers
