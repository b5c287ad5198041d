"""Casts of the user's own functions, and ``init``, the entry of apex's older API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from apex._core.scale import ScaleRule
from apex._engine.autocast.region import CastSpec
from apex._engine.autocast.user_functions import cast_function
from apex._engine.session import Session
from apex.amp import lists, report
from apex.amp._amp_state import OptProperties, _amp_state
from apex.amp.devices import all_device_types, warn_if_emulated
from apex.amp.handle import AmpHandle, NoOpHandle
from apex.amp.properties import LEVELS, as_loss_scale, to_policy

P = ParamSpec("P")
R = TypeVar("R")


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with floating arguments cast to the level's 16-bit type while casts are on.

    A decorator or a wrapper, for functions, methods, ``autograd.Function.apply`` and custom ops:
    fp16 at O1, bf16 at O4, and unchanged where no casts are on.
    """
    return cast_function(fn, "low_precision")


def bfloat16_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with floating arguments cast to bf16 while casts are on."""
    return cast_function(fn, "bfloat16")


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` computing in fp32: arguments cast up, casts off inside."""
    return cast_function(fn, "float")


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with floating arguments cast to the widest type among them."""
    return cast_function(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Makes ``module.name`` a :func:`half_function` while a session with op casts lives.

    Call it before ``amp.initialize``.

    Raises:
        ValueError: If ``module`` has no function ``name``.
    """
    _amp_state.functions.register(module, name, "low_precision")


def register_bfloat16_function(module: Any, name: str) -> None:
    """Makes ``module.name`` a :func:`bfloat16_function` while a session with op casts lives.

    Raises:
        ValueError: If ``module`` has no function ``name``.
    """
    _amp_state.functions.register(module, name, "bfloat16")


def register_float_function(module: Any, name: str) -> None:
    """Makes ``module.name`` a :func:`float_function` while a session with op casts lives.

    Raises:
        ValueError: If ``module`` has no function ``name``.
    """
    _amp_state.functions.register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Makes ``module.name`` a :func:`promote_function` while a session with op casts lives.

    Raises:
        ValueError: If ``module`` has no function ``name``.
    """
    _amp_state.functions.register(module, name, "promote")


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Turns on the casts of O1 in this thread and returns a handle: apex's older API.

    Args:
        enabled: With False the handle passes everything through.
        loss_scale: A number, or ``"dynamic"``.
        enable_caching: Accepted for old scripts, kept on the handle; a weight is cast once a
            forward in any case.
        verbose: Accepted for old scripts, kept on the handle.
        allow_banned: Let ``binary_cross_entropy`` take fp16, in fp32, instead of refusing it.

    Returns:
        A handle with ``scale_loss``, ``wrap_optimizer`` and ``is_active``; a later call replaces
        it.
    """
    _amp_state.release_handle()
    handle: AmpHandle | NoOpHandle = NoOpHandle()
    if enabled:
        session = o1_session(loss_scale, allow_banned=allow_banned)
        handle = AmpHandle.over(session, enable_caching=enable_caching, verbose=verbose)
    _amp_state.opt_properties = OptProperties({"enabled": enabled})
    _amp_state.hold_handle(handle)
    return handle


def o1_session(loss_scale: float | str, *, allow_banned: bool = False) -> Session:
    """Returns a session that casts as O1 in this thread, without models."""
    policy = to_policy(LEVELS["O1"])
    types = all_device_types()
    spec = CastSpec(torch.float16, types, lists.op_table(), allow_banned)
    scale = as_loss_scale("loss_scale", loss_scale)
    warn_if_emulated(policy.low_precision, types)
    session = Session(
        policy.with_loss_scale(scale),
        rule=ScaleRule(ceiling=2.0**24),
        spec=spec,
        functions=_amp_state.functions,
        listeners=(report.scale_update,),
    )
    session.start()
    _amp_state.add(session)
    return session
