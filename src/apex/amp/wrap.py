"""apex's function wrappers, except those that replaced functions of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from apex._engine.autocast.region import active_spec
from apex.amp.amp import promote_function
from apex.amp.utils import casted_args


def make_cast_wrapper(
    orig_fn: Callable[..., Any],
    cast_fn: Callable[[Any], Any],
    handle: object = None,
    try_caching: bool = False,
) -> Callable[..., Any]:
    """Returns ``orig_fn`` with floating-point arguments passed through ``cast_fn`` under casts.

    Args:
        orig_fn: The function to wrap.
        cast_fn: Casts one argument, such as ``apex.amp.utils.maybe_half``.
        handle: Ignored; accepted for old callers.
        try_caching: Ignored; accepted for old callers.
    """
    del handle, try_caching

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if active_spec() is None:
            return orig_fn(*args, **kwargs)
        return orig_fn(*casted_args(cast_fn, args, kwargs), **kwargs)

    return wrapper


def make_promote_wrapper(
    orig_fn: Callable[..., Any], cast_fn: object = None, handle: object = None
) -> Callable[..., Any]:
    """Returns ``promote_function(orig_fn)``; ignores the other arguments."""
    del cast_fn, handle
    return promote_function(orig_fn)


def __getattr__(name: str) -> Any:
    """Raises an AttributeError that explains why a wrapper is missing."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"apex.amp.wrap.{name} is not available: it replaced functions of torch, which this apex "
        "casts without replacing them. For your own functions, use amp.half_function, "
        "amp.float_function or amp.promote_function, or register them, as with "
        "amp.register_half_function(module, name)."
    )
