"""apex's wrappers of functions; those that replaced functions of torch are not here."""

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
    """Returns ``orig_fn`` with ``cast_fn`` applied to its floating arguments while casts are on.

    Args:
        orig_fn: The function.
        cast_fn: Casts one argument, such as ``apex.amp.utils.maybe_half``.
        handle: Accepted for old callers, not used.
        try_caching: Accepted for old callers, not used.
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
    """Returns ``orig_fn`` as :func:`apex.amp.promote_function` does; the rest is not used."""
    del cast_fn, handle
    return promote_function(orig_fn)


def __getattr__(name: str) -> Any:
    """Says why a wrapper of apex is not here."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"apex.amp.wrap.{name} is not here: it replaced functions of torch, and this apex casts "
        "them without. For a function of your own use amp.half_function, amp.float_function, "
        "amp.promote_function or amp.register_half_function(module, name) and its like."
    )
