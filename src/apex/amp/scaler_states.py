"""Loss scales in apex's checkpoint format: written, read and checked, and set."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from apex._engine.scaler import Scaler

State = tuple[float, int]
"""Loss scale (multiplier) and clean steps since it last changed."""


def entries(scalers: Iterable[Scaler]) -> Iterator[tuple[str, dict[str, float | int]]]:
    """Yields key and state of every scaler: ``"loss_scaler0"`` and so on."""
    for index, scaler in enumerate(scalers):
        yield f"loss_scaler{index}", dict(scaler.state())


def put(scalers: Sequence[Scaler], states: Sequence[State]) -> None:
    """Sets the scalers from the states, as far as both go."""
    for scaler, (loss_scale, unskipped) in zip(scalers, states, strict=False):
        scaler.set_scale(loss_scale)
        scaler.set_clean_steps(unskipped)


def parsed(state_dict: Mapping[Any, Any]) -> list[State]:
    """Returns scale and count of every scaler in a checkpoint, in order.

    Raises:
        RuntimeError: For a key or value that does not belong there, naming it.
    """
    indices: dict[int, State] = {}
    for key, value in state_dict.items():
        match = re.fullmatch(r"loss_scaler(\d+)", key) if isinstance(key, str) else None
        if match is None:
            raise RuntimeError(
                f"amp.load_state_dict got the unexpected key {key!r}. It takes what "
                "amp.state_dict() returns: 'loss_scaler0', 'loss_scaler1' and so on."
            )
        indices[int(match[1])] = _parsed(key, value)
    return [indices[index] for index in sorted(indices)]


def _parsed(key: str, value: Any) -> State:
    if not isinstance(value, Mapping):
        raise RuntimeError(f"amp.load_state_dict: {key!r} holds {value!r}; it must be a dict.")
    for name in ("loss_scale", "unskipped"):
        if isinstance(value.get(name), bool) or not isinstance(value.get(name), int | float):
            raise RuntimeError(
                f"amp.load_state_dict: {key}[{name!r}] is {value.get(name)!r}; it must be a "
                "number. The checkpoint is cut short or of another kind."
            )
    loss_scale, unskipped = float(value["loss_scale"]), value["unskipped"]
    if not (loss_scale > 0.0 and math.isfinite(loss_scale)):
        raise RuntimeError(
            f"amp.load_state_dict: {key}['loss_scale'] is {loss_scale}; it must be positive and "
            "finite."
        )
    if unskipped < 0 or unskipped != int(unskipped):
        raise RuntimeError(
            f"amp.load_state_dict: {key}['unskipped'] is {unskipped}; it must be a count."
        )
    return loss_scale, int(unskipped)
