"""Reads, validates and writes loss scales in apex's checkpoint format.

Note [Versioned key]: an entry holds apex's two keys, ``loss_scale`` and ``unskipped``. This package
stores its additions beside them under ``apex_amp_v1``, which apex does not read; a later format
will use a key with another number, and unknown keys are ignored. Static scales have
``{"dynamic": False}`` there. Without it, a checkpoint of O4 (static, 1.0) would start the
dynamic scale of O2 at 1.0, and fp16 gradients would underflow until the scale had grown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from apex._core.arguments import shown
from apex._core.scale import SMALLEST_SCALE, ScaleRule
from apex._engine.scaler import Scaler

VERSIONED = "apex_amp_v1"
"""Key of this package's additions; see Note [Versioned key]."""

_MIN_SCALE, _MAX_SCALE = SMALLEST_SCALE, ScaleRule().greatest
_MAX_STEPS = 2**31 - 1
_ENTRY = re.compile(r"loss_scaler(0|[1-9][0-9]*)")
_log = logging.getLogger("apex")


class State(NamedTuple):
    """One scaler's entry in a checkpoint.

    Attributes:
        key: ``"loss_scaler0"`` and so on.
        loss_scale: Multiplier of the loss.
        unskipped: Clean steps since the scale last changed.
        static: Whether the scale is static; ``None`` if unknown.
    """

    key: str
    loss_scale: float
    unskipped: int
    static: bool | None = None


def entries(scalers: Iterable[Scaler]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the key and state of every scaler: ``"loss_scaler0"`` and so on."""
    for index, scaler in enumerate(scalers):
        state = scaler.state()
        scale, steps = state["loss_scale"], int(state["unskipped"])
        yield entry(State(f"loss_scaler{index}", scale, steps, not scaler.dynamic))


def entry(state: State) -> tuple[str, dict[str, Any]]:
    """Returns the key and value of one scaler in a checkpoint."""
    value: dict[str, Any] = {"loss_scale": state.loss_scale, "unskipped": state.unskipped}
    return state.key, {**value, VERSIONED: {"dynamic": False}} if state.static else value


def set_scalers(scalers: Sequence[Scaler], states: Sequence[State]) -> None:
    """Sets the scalers from the states, in order; ignores extra scalers and states.

    Skips and logs a static state for a dynamic scaler, and the reverse, and a static scale of 1,
    which scales nothing, for a static scaler of another scale, and the reverse. A state of unknown
    kind (of apex) is accepted by a dynamic scaler, or by a static one with the same scale.
    """
    for scaler, state in zip(scalers, states, strict=False):
        if _accepts(scaler, state):
            scaler.set_scale(state.loss_scale)
            scaler.set_clean_steps(state.unskipped)
        else:
            _log_skipped(state, scaler)


def apply_pending(scalers: Sequence[Scaler], pending: Sequence[State]) -> list[State]:
    """Sets the scalers of a new session from pending states; returns the remaining states."""
    rest = list(pending[len(scalers) :])
    set_scalers(scalers, pending)
    if pending and len(pending) < len(scalers):
        fresh = ", ".join(map(str, range(len(pending), len(scalers))))
        _log.warning(
            f"amp.initialize: the checkpoint has no scale for loss {fresh}; it starts at the "
            "default."
        )
    if rest:
        left = ", ".join(state.key for state in rest)
        _log.warning(
            f"amp.initialize: the next amp.initialize call will load {left} of the checkpoint."
        )
    return rest


def is_key(key: object) -> bool:
    """Returns whether ``key`` is the key of a scaler."""
    return isinstance(key, str) and _ENTRY.fullmatch(key) is not None


def parsed(state_dict: Any) -> list[State]:
    """Returns the scalers' states in a checkpoint, in order.

    Raises:
        RuntimeError: If a key or value is unexpected or a key is missing; the message names it.
    """
    if not isinstance(state_dict, Mapping):
        raise RuntimeError(
            f"amp.load_state_dict got {shown(state_dict)}; it accepts the dict that "
            "amp.state_dict() returns."
        )
    indices: dict[int, State] = {}
    for key, value in state_dict.items():
        match = _ENTRY.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            raise RuntimeError(
                f"amp.load_state_dict got the unexpected key {key!r}. It accepts the keys of "
                "amp.state_dict(): 'loss_scaler0', 'loss_scaler1' and so on."
            )
        indices[int(match[1])] = _parsed(key, value)
    for index in range(len(indices)):
        if index not in indices:
            raise RuntimeError(
                f"amp.load_state_dict: 'loss_scaler{index}' is missing; the keys are "
                f"{', '.join(state_dict)}. The checkpoint is truncated."
            )
    return [indices[index] for index in sorted(indices)]


def checked(
    place: str, values: Mapping[str, Any], names: tuple[str, str] = ("loss_scale", "unskipped")
) -> tuple[float, int]:
    """Returns the scale and the count of clean steps in ``values``, under ``names``.

    Raises:
        RuntimeError: If one is missing or out of range; the message names it and ``place``.
    """
    for name in names:
        if isinstance(values.get(name), bool) or not isinstance(values.get(name), int | float):
            raise RuntimeError(
                f"{place}[{name!r}] is {shown(values.get(name))}; it must be a number. The "
                "checkpoint is truncated or of another kind."
            )
    loss_scale, unskipped = values[names[0]], values[names[1]]
    if not _MIN_SCALE <= loss_scale <= _MAX_SCALE:
        raise RuntimeError(
            f"{place}[{names[0]!r}] is {shown(loss_scale)}; it must be positive and finite in fp32."
        )
    if not (0 <= unskipped <= _MAX_STEPS and unskipped == int(unskipped)):
        raise RuntimeError(
            f"{place}[{names[1]!r}] is {shown(unskipped)}; it must be a count of steps."
        )
    return float(loss_scale), int(unskipped)


def _parsed(key: str, value: Any) -> State:
    if not isinstance(value, Mapping):
        raise RuntimeError(f"amp.load_state_dict: {key!r} holds {shown(value)}; it must be a dict.")
    loss_scale, unskipped = checked(f"amp.load_state_dict: {key}", value)
    added = value.get(VERSIONED, {})
    dynamic = added.get("dynamic") if isinstance(added, Mapping) else added
    if not isinstance(dynamic, bool | None):
        raise RuntimeError(
            f"amp.load_state_dict: {key}[{VERSIONED!r}] is {shown(added)}; it must be a dict whose "
            "'dynamic' is True or False."
        )
    return State(key, loss_scale, unskipped, None if dynamic is None else not dynamic)


def _accepts(scaler: Scaler, state: State) -> bool:
    if scaler.dynamic:
        return not state.static
    scales = state.loss_scale, scaler.read_scale()
    return state.static is not False and (
        scales[0] == scales[1] or (state.static is True and 1.0 not in scales)
    )


def _log_skipped(state: State, scaler: Scaler) -> None:
    if scaler.dynamic:
        _log.warning(
            f"amp skipped {state.key}: the checkpoint's scale is static ({state.loss_scale:g}) but "
            f"this scaler is dynamic, at {scaler.read_scale():g}."
        )
    else:
        _log.warning(
            f"amp skipped {state.key}: this scaler is static ({scaler.read_scale():g}). To "
            f"continue with the checkpoint's {state.loss_scale:g}, pass it or 'dynamic' as "
            "loss_scale to amp.initialize."
        )
