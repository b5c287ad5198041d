"""Makes sessions: their device types, op casts and reports."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from apex._core.op_table import AutocastSpec
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._engine.session import Session
from apex._torch.devices import device_types, emulates_fp16
from apex.amp import lists, report
from apex.amp._amp_state import _amp_state
from apex.amp.properties import as_loss_scale, level_defaults, to_policy


def new_session(
    policy: Policy,
    rule: ScaleRule,
    *,
    models: Sequence[nn.Module] = (),
    num_losses: int = 1,
    keep_fp32: bool = False,
    allow_banned: bool = False,
) -> Session:
    """Returns a session that is not started; warns if its fp16 is emulated."""
    types, dtype, spec = device_types(models), policy.compute_dtype, None
    if dtype is not None:
        spec = AutocastSpec(dtype, types, lists.op_table(dtype), allow_banned)
        _amp_state.functions.listed = lists.python_functions()
    _warn_if_emulated(policy.low_precision, types)
    return Session(
        policy,
        num_losses=num_losses,
        rule=rule,
        spec=spec,
        functions=_amp_state.functions,
        listeners=(report.end_of_pass,),
        keep_fp32=keep_fp32,
    )


def start_o1_session(loss_scale: float | str, *, allow_banned: bool = False) -> Session:
    """Starts a session without models that applies O1's casts in this thread."""
    scale = as_loss_scale("loss_scale", loss_scale)
    policy = to_policy(level_defaults("O1", loss_scale=scale))
    session = new_session(policy, ScaleRule(ceiling=2.0**24), allow_banned=allow_banned)
    session.start()
    _amp_state.add(session)
    return session


def _warn_if_emulated(dtype: torch.dtype | None, types: Sequence[str]) -> None:
    if dtype is torch.float16 and "cpu" in types and emulates_fp16():
        warnings.warn(
            "fp16 is emulated on this CPU: matrix products are far slower than in fp32. Use bf16 "
            "here: opt_level 'O4' instead of 'O1', or 'O5' instead of 'O2'.",
            UserWarning,
            stacklevel=4,
        )
