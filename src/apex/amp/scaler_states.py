"""Reads, validates and writes loss scales in apex's checkpoint format.

Note [Versioned key]: an entry holds apex's two keys, ``loss_scale`` and ``unskipped``. This package
stores its additions beside them under ``apex_amp_v1``, which apex does not read. A later format
will use a key with another number, which this release rejects; it ignores other keys. Static scales
have ``{"dynamic": False}`` there. Otherwise a checkpoint of O4 (static, 1.0) would start the
dynamic scale of O2 at 1.0. Then fp16 gradients would underflow until the scale had grown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from apex._core.arguments import is_number, shown
from apex._core.scale import SMALLEST_SCALE, ScaleRule
from apex._core.user_files import warn_at_caller
from apex._engine.scaler import Scaler

_ANY_VERSION = "apex_amp_v"

VERSIONED = f"{_ANY_VERSION}1"
"""Key of this package's additions; see Note [Versioned key]."""

_RANGES = {
    "loss_scale": (SMALLEST_SCALE, ScaleRule(max_scale=None).greatest),
    "unskipped": (0, 2**31 - 1),
}
_ENTRY = re.compile(r"loss_scaler(0|[1-9][0-9]*)")
_log = logging.getLogger("apex")


class State(NamedTuple):
    """One scaler's entry in a checkpoint.

    Attributes:
        key: ``"loss_scaler0"`` and so on.
        loss_scale: Multiplier of the loss.
        unskipped: Clean steps since the scale last changed.
        static: Whether the scale is known to be static.
    """

    key: str
    loss_scale: float
    unskipped: int
    static: bool


def entries(scalers: Iterable[Scaler]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the key and state of every scaler: ``"loss_scaler0"`` and so on."""
    for index, scaler in enumerate(scalers):
        state: dict[str, Any] = {
            "loss_scale": scaler.read_scale(),
            "unskipped": scaler.read_growth_tracker(),
        }
        if not scaler.dynamic:
            state[VERSIONED] = {"dynamic": False}
        yield f"loss_scaler{index}", state


def set_scalers(scalers: Sequence[Scaler], states: Sequence[State]) -> None:
    """Sets the scalers from the states, in order; warns of extra scalers and states.

    A static scale of 1 scales nothing: it takes no other scale, and no other scaler takes it. Skips
    and logs any other static state for a dynamic scaler, and the reverse. A state of unknown kind
    (of apex) is accepted by a dynamic scaler, or by a static one with the same scale.
    """
    if len(states) != len(scalers):
        warn_at_caller(
            f"amp.load_state_dict got {len(states)} loss scalers, but amp has {len(scalers)}; "
            f"the first {min(len(states), len(scalers))} are loaded. Pass the same num_losses to "
            "amp.initialize to load all. (A state without any was saved with amp disabled.)"
        )
    for scaler, state in zip(scalers, states, strict=False):
        scale = scaler.read_scale()
        scales_nothing = 1.0 in (state.loss_scale, scale)
        if scaler.dynamic:
            takes = not state.static
        else:
            takes = state.static and not scales_nothing
        if takes or state.loss_scale == scale:
            scaler.set_scale(state.loss_scale)
            scaler.set_growth_tracker(state.unskipped)
        elif not scales_nothing:
            wanted = f"{state.loss_scale:g}" if scaler.dynamic else "'dynamic'"
            _log.warning(
                f"amp.load_state_dict ignored {state.key} of the checkpoint (loss scale "
                f"{state.loss_scale:g}), because this loss scale is "
                f"{'dynamic' if scaler.dynamic else 'static'} ({scale:g}). To use the checkpoint's "
                f"scale, pass loss_scale={wanted} to amp.initialize."
            )


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
    for key in state_dict:
        if not (isinstance(key, str) and _ENTRY.fullmatch(key)):
            raise RuntimeError(
                f"amp.load_state_dict got the unexpected key {key!r}. It accepts the keys of "
                "amp.state_dict(): 'loss_scaler0', 'loss_scaler1' and so on."
            )
    keys = [f"loss_scaler{index}" for index in range(len(state_dict))]
    for key in keys:
        if key not in state_dict:
            raise RuntimeError(
                f"amp.load_state_dict: {key!r} is missing; the keys are {', '.join(state_dict)}. "
                "The checkpoint is truncated."
            )
    return [_parsed(key, state_dict[key]) for key in keys]


def _parsed(key: str, value: Any) -> State:
    values = value if isinstance(value, Mapping) else {}
    for name, (least, most) in _RANGES.items():
        number: Any = values.get(name)
        accepted = is_number(number) and least <= number <= most
        wanted = "a number"
        if name == "unskipped":
            accepted = accepted and number == int(number)
            wanted = "a whole number"
        if not accepted:
            raise RuntimeError(
                f"amp.load_state_dict: {key}[{name!r}] is {shown(number)}; it must be {wanted} "
                f"from {least:g} to {most:g}. The checkpoint is truncated or of another kind."
            )
    for name in values:
        if str(name).startswith(_ANY_VERSION) and name != VERSIONED:
            raise RuntimeError(
                f"amp.load_state_dict: {key} has {name!r}, which a later release of apex has "
                f"written; this one knows {VERSIONED!r}. Load the checkpoint with that release."
            )
    added = values.get(VERSIONED)
    static = isinstance(added, Mapping) and added.get("dynamic") is False
    return State(key, values["loss_scale"], int(values["unskipped"]), static)
