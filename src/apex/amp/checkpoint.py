"""Converts checkpoints of other tools and of older apex releases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from apex._core.scale import ScaleRule
from apex.amp import scaler_states

if TYPE_CHECKING:
    from apex._engine.checkpoint import Matched
    from apex.amp.checkpoint_kinds import Contents

__all__ = ["Converted", "Target", "convert"]

Target = Literal["amp", "grad_scaler", "optimizer", "weights"]


@dataclass(frozen=True)
class Converted:
    """The result of :func:`convert`.

    Attributes:
        state: The state in the requested form.
        lost: What this form cannot represent, one sentence each; empty for a lossless conversion.
    """

    state: dict[str, Any]
    lost: tuple[str, ...] = ()


def convert(checkpoint: Mapping[str, Any], *, to: Target) -> Converted:
    """Returns one part of a checkpoint in the form ``to``, and lists what is lost.

    Recognizes by their keys: ``amp.state_dict()`` of apex and of this package; the state of a
    ``torch.amp.GradScaler``; apex's ``FP16_Optimizer`` classes (2018: ``apex.fp16_utils``; 2019:
    ``apex.optimizers`` and ``apex.contrib.optimizers``); optimizers of MMEngine's
    ``ApexOptimWrapper`` (``apex_amp``) and of torch; state dicts of models; and whole checkpoints
    that contain these, as in ``{"model": ..., "optimizer": ..., "epoch": 3}``. Does not modify
    ``checkpoint``; the result may share its tensors.

    ================= ==========================================================================
    ``to``            result
    ================= ==========================================================================
    ``"amp"``         loss scales, for ``amp.load_state_dict``
    ``"grad_scaler"`` the first loss scale, for ``torch.amp.GradScaler.load_state_dict``
    ``"optimizer"``   the optimizer's own state, for a plain or a prepared torch optimizer
    ``"weights"``     a state dict in fp32, with the masters' values where the checkpoint has them
    ================= ==========================================================================

    Args:
        checkpoint: The dict that ``torch.load`` returned, or a dict inside it.
        to: The target form.

    Raises:
        TypeError: If ``checkpoint`` is not a dict.
        ValueError: If ``to`` is unknown, or the required state is missing or occurs twice; if the
            moments of a flat group of parameters are in 8 bits or fewer.
        RuntimeError: If a loss scale is invalid; the message names its key.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> saved = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=500).state_dict()
        >>> scale = amp.checkpoint.convert(saved, to="amp")
        >>> scale.state
        {'loss_scaler0': {'loss_scale': 1024.0, 'unskipped': 0}}
        >>> scale.lost
        ('growth_interval is 500: pass it to amp.initialize.',)

        The model's 16-bit weights take the exact values of the optimizer's masters:

        >>> weight = torch.tensor([1 / 3])
        >>> old = {
        ...     "model": {"weight": weight.half()},
        ...     "optimizer": {
        ...         "cur_scale": 8.0, "dynamic_loss_scale": False, "fp32_groups_flat": [weight],
        ...         "optimizer_state_dict": {"state": {}, "param_groups": [{"params": [0]}]},
        ...     },
        ... }
        >>> amp.checkpoint.convert(old, to="weights")
        Converted(state={'weight': tensor([0.3333])}, lost=())
        >>> amp.checkpoint.convert(old, to="amp").state["loss_scaler0"]["loss_scale"]
        8.0
    """
    if to not in _FORMS:
        names = ", ".join(map(repr, _FORMS))
        raise ValueError(f"amp.checkpoint.convert got to={to!r}; it accepts {names}.")
    if not isinstance(checkpoint, Mapping):
        raise TypeError(
            f"amp.checkpoint.convert got {type(checkpoint).__name__}; it accepts the dict that "
            "torch.load returned, or one inside it."
        )
    # Imported here to keep `import apex.amp` fast: few scripts convert.
    from apex.amp.checkpoint_kinds import Contents

    return _FORMS[to](Contents(checkpoint))


def _to_amp(found: Contents) -> Converted:
    part, default = found.require("scales"), ScaleRule()
    lost = [
        f"{name} is {getattr(part.rule, name):g}: pass it to amp.initialize."
        for name in ("growth_factor", "backoff_factor", "growth_interval")
        if getattr(part.rule, name) != getattr(default, name)
    ]
    return Converted(dict(map(scaler_states.entry, part.scales or ())), tuple(lost))


def _to_grad_scaler(found: Contents) -> Converted:
    part = found.require("scales")
    if not part.scales:  # a disabled amp becomes a disabled GradScaler
        return Converted({})
    first, *others = part.scales
    lost = [f"{state.key}: a GradScaler has one scale." for state in others]
    if first.static:
        lost.append(f"{first.key} is static: a GradScaler's scale is dynamic.")
    state = {
        "scale": first.loss_scale,
        "growth_factor": part.rule.growth_factor,
        "backoff_factor": part.rule.backoff_factor,
        "growth_interval": part.rule.growth_interval,
        "_growth_tracker": first.unskipped,
    }
    return Converted(state, tuple(lost))


def _to_optimizer(found: Contents) -> Converted:
    from apex._engine import checkpoint as tensors

    part = found.require("optimizer")
    state = dict(part.optimizer or {})
    lost = tuple(f"{name} is not part of an optimizer's state." for name in part.other_keys)
    if tensors.is_flat(state, part.flats):
        state = tensors.split_flat_state(state, part.flats, _matched(found).shapes)
    return Converted(state, lost)


def _to_weights(found: Contents) -> Converted:
    matched = _matched(found)
    lost = [f"{name} is 16-bit and has no master." for name in matched.rounded]
    if matched.unused:
        lost.append(f"Masters that match no entry in the model's state dict: {matched.unused}.")
    return Converted(matched.weights, tuple(lost))


def _matched(found: Contents) -> Matched:
    from apex._engine import checkpoint as tensors

    entries, optimizer = found.require("model").model or {}, found.find("optimizer")
    if optimizer is None:
        return tensors.fp32_weights(entries)
    return tensors.fp32_weights(entries, optimizer.masters, optimizer.flats)


_FORMS: dict[str, Callable[[Contents], Converted]] = {
    "amp": _to_amp,
    "grad_scaler": _to_grad_scaler,
    "optimizer": _to_optimizer,
    "weights": _to_weights,
}
