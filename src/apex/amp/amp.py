"""Casts for user functions, and ``init``, the entry point of apex's older API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from apex._core.arguments import flag
from apex._engine.autocast.user_functions import cast_function
from apex.amp._amp_state import _amp_state
from apex.amp.frontend import *  # noqa: F403 - scripts import apex.amp.amp as amp
from apex.amp.handle import AmpHandle, NoOpHandle
from apex.amp.inputs import takes_dtype_at
from apex.amp.properties import as_low_precision
from apex.amp.sessions import start_init_session, warn_if_emulated

P = ParamSpec("P")
R = TypeVar("R")


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with floating-point arguments cast to the level's 16-bit dtype.

    Use it as a decorator or wrapper for functions, methods, ``autograd.Function.apply`` and custom
    ops. The dtype is fp16 at O1 and bf16 at O4; where casts are off, arguments stay unchanged.
    """
    return cast_function(fn, "low_precision")


def bfloat16_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with floating-point arguments cast to bf16 while casts are on."""
    return cast_function(fn, "bfloat16")


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with 16-bit arguments cast to fp32 and casts off inside."""
    return cast_function(fn, "float")


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns ``fn`` with floating-point arguments cast to the widest dtype among them."""
    return cast_function(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Makes ``module.name`` a :func:`half_function` during sessions with op casts.

    Call it before or after ``amp.initialize``.

    Raises:
        ValueError: If ``module`` has no function ``name``, or it cannot be replaced there.
    """
    _amp_state.functions.register(module, name, "low_precision")


def register_bfloat16_function(module: Any, name: str) -> None:
    """Makes ``module.name`` a :func:`bfloat16_function` during sessions with op casts.

    Raises:
        ValueError: If ``module`` has no function ``name``, or it cannot be replaced there.
    """
    _amp_state.functions.register(module, name, "bfloat16")


def register_float_function(module: Any, name: str) -> None:
    """Makes ``module.name`` a :func:`float_function` during sessions with op casts.

    Raises:
        ValueError: If ``module`` has no function ``name``, or it cannot be replaced there.
    """
    _amp_state.functions.register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Makes ``module.name`` a :func:`promote_function` during sessions with op casts.

    Raises:
        ValueError: If ``module`` has no function ``name``, or it cannot be replaced there.
    """
    _amp_state.functions.register(module, name, "promote")


@takes_dtype_at(2, "patch_type")
def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Turns on O1's casts in this thread and returns a handle (apex's older API).

    A dtype as the third positional argument is ``patch_type``, as in the ROCm fork:
    ``init(True, "dynamic", dtype)``. Fp16 models of earlier ``initialize`` calls (O2, O3) also run
    with these casts.

    Args:
        enabled: If False, nothing is cast and the handle returns losses unscaled.
        loss_scale: A number, or ``"dynamic"``.
        enable_caching: Value of ``handle.has_cache``; weights share casts in any case.
        verbose: Value of ``handle.verbose``; has no other effect.
        allow_banned: Whether ``binary_cross_entropy`` runs in fp32 on fp16 input instead of
            raising.
        patch_type: ``torch.float16``, or ``torch.bfloat16`` for O4's casts.

    Returns:
        A handle with ``scale_loss``, ``wrap_optimizer`` and ``is_active``. A later call
        deactivates it.
    """
    enabled = flag("enabled", enabled)
    allow_banned = flag("allow_banned", allow_banned)
    as_low_precision("patch_type", patch_type)
    handle: AmpHandle = NoOpHandle()
    if enabled:
        started = start_init_session(loss_scale, patch_type, allow_banned=allow_banned)
        warn_if_emulated(started.policy)
        handle = AmpHandle(loss_scale, enable_caching, verbose, session=started)
        for session in _amp_state.sessions():
            if session.policy.param_dtype is torch.float16:
                session.cast_by(started)
    _amp_state.hold_handle(handle)
    return handle
