"""Loss scales in apex's checkpoint format: written, read and checked, and set.

Note [Versioned key]: an entry holds apex's two keys, ``loss_scale`` and ``unskipped``. What this
project adds is under ``apex_amp_v1`` beside them, which apex does not read; a later version will
use a key with its own number, and unknown keys are ignored. So far the key exists only for static
scales, as ``{"dynamic": False}``. Without it a checkpoint of O4 (static, 1.0) would start the
dynamic scale of O2 at 1.0, and fp16 gradients would underflow until the scale had grown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from apex._core.scale import SMALLEST_SCALE, ScaleRule
from apex._engine.scaler import Scaler
from apex._torch import ranks

VERSIONED = "apex_amp_v1"
"""What this project adds to apex's entry, see Note [Versioned key]."""

_LEAST, _GREATEST = SMALLEST_SCALE, ScaleRule().greatest
_MOST_STEPS = 2**31 - 1
_ENTRY = re.compile(r"loss_scaler(0|[1-9][0-9]*)")
_log = logging.getLogger("apex")


class State(NamedTuple):
    """One scaler's entry in a checkpoint.

    Attributes:
        key: ``"loss_scaler0"`` and so on.
        loss_scale: The multiplier of the loss.
        unskipped: Clean steps since it last changed.
        static: Whether the scale is static; ``None`` if the file does not say.
    """

    key: str
    loss_scale: float
    unskipped: int
    static: bool | None = None


def entries(scalers: Iterable[Scaler]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields key and state of every scaler: ``"loss_scaler0"`` and so on."""
    for index, scaler in enumerate(scalers):
        key, state = f"loss_scaler{index}", scaler.state()
        yield entry(key, state["loss_scale"], int(state["unskipped"]), static=not scaler.dynamic)


def entry(
    key: str, loss_scale: float, unskipped: int, *, static: bool
) -> tuple[str, dict[str, Any]]:
    """Returns key and value of one scaler in a checkpoint."""
    value: dict[str, Any] = {"loss_scale": loss_scale, "unskipped": unskipped}
    return key, {**value, VERSIONED: {"dynamic": False}} if static else value


def put(scalers: Sequence[Scaler], states: Sequence[State]) -> None:
    """Sets the scalers from the states, in order; extra scalers and states are left alone.

    Skips a static state for a dynamic scaler and the other way round, and logs it. A state that
    does not say which it is (apex's own) fits a dynamic scaler, or a static one of the same scale.
    """
    for scaler, state in zip(scalers, states, strict=False):
        if _belongs(state, scaler):
            scaler.set_scale(state.loss_scale)
            scaler.set_clean_steps(state.unskipped)
        else:
            _log_skipped(state, scaler)


def hand_over(scalers: Sequence[Scaler], waiting: Sequence[State]) -> list[State]:
    """Sets the scalers of a new session from the waiting states; returns those left over."""
    rest = list(waiting[len(scalers) :])
    put(scalers, waiting)
    if waiting and len(waiting) < len(scalers):
        fresh = ", ".join(map(str, range(len(waiting), len(scalers))))
        log_rank0(
            f"amp.initialize: the checkpoint has no scale for loss {fresh}, which starts at its "
            "default."
        )
    if rest:
        left = ", ".join(state.key for state in rest)
        log_rank0(
            f"amp.initialize: {left} of the checkpoint will go to the next amp.initialize call."
        )
    return rest


def log_rank0(message: str, level: int = logging.WARNING) -> None:
    """Logs ``message`` to the logger ``apex``, on rank 0 only."""
    if ranks.rank() == 0:
        _log.log(level, message)


def is_key(key: object) -> bool:
    """Returns whether a checkpoint's key is that of a scaler."""
    return isinstance(key, str) and _ENTRY.fullmatch(key) is not None


def parsed(state_dict: Any) -> list[State]:
    """Returns every scaler's state in a checkpoint, in order.

    Raises:
        RuntimeError: For an unexpected key or value, naming it.
    """
    if not isinstance(state_dict, Mapping):
        raise RuntimeError(
            f"amp.load_state_dict got {_shown(state_dict)}; it takes what amp.state_dict() "
            "returns, a dict."
        )
    indices: dict[int, State] = {}
    for key, value in state_dict.items():
        match = _ENTRY.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            raise RuntimeError(
                f"amp.load_state_dict got the unexpected key {key!r}. It takes what "
                "amp.state_dict() returns: 'loss_scaler0', 'loss_scaler1' and so on."
            )
        indices[int(match[1])] = _parsed(key, value)
    for index in range(len(indices)):
        if index not in indices:
            raise RuntimeError(
                f"amp.load_state_dict: 'loss_scaler{index}' is missing beside "
                f"{', '.join(state_dict)}. The checkpoint is truncated."
            )
    return [indices[index] for index in sorted(indices)]


def checked(
    place: str, values: Mapping[str, Any], names: tuple[str, str] = ("loss_scale", "unskipped")
) -> tuple[float, int]:
    """Returns the scale and the count in ``values``, under ``names``.

    Raises:
        RuntimeError: If one is missing or out of range, naming it and ``place``.
    """
    for name in names:
        if isinstance(values.get(name), bool) or not isinstance(values.get(name), int | float):
            raise RuntimeError(
                f"{place}[{name!r}] is {_shown(values.get(name))}; it must be a number. The "
                "checkpoint is truncated or of another kind."
            )
    loss_scale, unskipped = values[names[0]], values[names[1]]
    if not _LEAST <= loss_scale <= _GREATEST:
        raise RuntimeError(
            f"{place}[{names[0]!r}] is {_shown(loss_scale)}; it must be positive and finite in "
            "fp32."
        )
    if not (0 <= unskipped <= _MOST_STEPS and unskipped == int(unskipped)):
        raise RuntimeError(f"{place}[{names[1]!r}] is {_shown(unskipped)}; it must be a count.")
    return float(loss_scale), int(unskipped)


def _parsed(key: str, value: Any) -> State:
    if not isinstance(value, Mapping):
        raise RuntimeError(
            f"amp.load_state_dict: {key!r} holds {_shown(value)}; it must be a dict."
        )
    loss_scale, unskipped = checked(f"amp.load_state_dict: {key}", value)
    return State(key, loss_scale, unskipped, _static(key, value.get(VERSIONED, {})))


def _static(key: str, added: Any) -> bool | None:
    dynamic = added.get("dynamic") if isinstance(added, Mapping) else added
    if dynamic is None or isinstance(dynamic, bool):
        return None if dynamic is None else not dynamic
    raise RuntimeError(
        f"amp.load_state_dict: {key}[{VERSIONED!r}] is {_shown(added)}; it must be a dict whose "
        "'dynamic' is True or False."
    )


def _belongs(state: State, scaler: Scaler) -> bool:
    if state.static is not None:
        return state.static is not scaler.dynamic
    return scaler.dynamic or state.loss_scale == scaler.read_scale()


def _log_skipped(state: State, scaler: Scaler) -> None:
    if scaler.dynamic:
        log_rank0(
            f"amp skipped {state.key}: the checkpoint's scale is static ({state.loss_scale:g}) but "
            f"this scaler is dynamic, at {scaler.read_scale():g}."
        )
    else:
        log_rank0(
            f"amp skipped {state.key}: this scaler is static ({scaler.read_scale():g}). To "
            f"continue with the checkpoint's {state.loss_scale:g}, pass it or 'dynamic' as "
            "loss_scale to amp.initialize."
        )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"a {type(value).__name__}"
