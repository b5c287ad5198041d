"""Makes sessions: their device types, op casts and reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from apex._core.op_table import AutocastSpec
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._core.user_files import warn_at_caller
from apex._engine.autocast.ambient import this_thread
from apex._engine.prepare import begin
from apex._engine.registry import live_specs
from apex._engine.session import Maker, Session
from apex._engine.watch import Watch
from apex._torch.devices import device_types, emulation
from apex.amp import lists, report
from apex.amp._amp_state import _amp_state
from apex.amp.properties import Properties, as_loss_scale, level_defaults, to_policy


def new_session(
    policy: Policy,
    rule: ScaleRule,
    *,
    models: Sequence[nn.Module] = (),
    num_losses: int = 1,
    keep_fp32: bool = False,
    made_by: Maker,
    options: Properties | None = None,
    allow_banned: bool = False,
) -> Session:
    """Returns a session that is not started, with the op casts of ``amp.lists``."""
    dtype = policy.compute_dtype
    spec = None
    if dtype is not None:
        table, functions = lists.casts(dtype)
        if allow_banned:
            table = table.without_bans()
        spec = AutocastSpec(dtype, device_types(models), table)
        if made_by == "init":  # as in the original, ``x.cpu()`` is fp32
            functions.append((torch.Tensor, "cpu", "float"))
        _amp_state.functions.list_only(functions)
    return Session(
        policy,
        num_losses=num_losses,
        rule=rule,
        spec=spec,
        functions=_amp_state.functions,
        keep_fp32=keep_fp32,
        made_by=made_by,
        report=report.overflow,
        observer=Watch(),
        options=options,
    )


def start_init_session(
    loss_scale: float | str, dtype: torch.dtype = torch.float16, *, allow_banned: bool = False
) -> Session:
    """Starts the session of ``amp.init``, which has no models and casts in this thread."""
    properties = level_defaults("O1" if dtype is torch.float16 else "O4")
    properties.loss_scale = as_loss_scale("loss_scale", loss_scale)
    session = new_session(
        to_policy(properties),
        ScaleRule(),
        made_by="init",
        allow_banned=allow_banned,
    )
    begin(session, used_by_script=True)
    return session


def warn_if_casts_stay() -> None:
    """Warns, at the line that called amp, if an earlier call's casts are on in this thread."""
    if live_specs(begun_in=this_thread()):
        warn_at_caller(
            "amp.initialize(enabled=False) prepares nothing, but the casts of an earlier call are "
            "still on in this thread, as one of its models lives: this model computes in 16 bits, "
            "too. For fp32, call amp.restore on the earlier model first, or pass opt_level='O0'."
        )


def warn_if_emulated(policy: Policy, models: Sequence[nn.Module] = ()) -> None:
    """Warns, at the line that called amp, if the CPU emulates the level's 16-bit dtype."""
    emulated = emulation(policy.low_precision)
    if not emulated or device_types(models) != ("cpu",):
        return
    advice = "Train with opt_level 'O0' here, and use 16-bit levels to test a script for a GPU."
    if not emulation(torch.bfloat16):
        advice = "Use bf16 here: opt_level 'O4' instead of 'O1', or 'O5' instead of 'O2'."
    warn_at_caller(f"{emulated}: matrix products are far slower than in fp32. {advice}")
