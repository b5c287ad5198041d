"""apex's function wrappers: each name's error says what to use."""

from __future__ import annotations

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    """Raises an AttributeError that explains why a wrapper is missing."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"apex.amp.wrap.{name} is not available: it replaced functions of torch, which this apex "
        "casts without replacing them. For your own functions, use amp.half_function, "
        "amp.float_function or amp.promote_function, or register them, as with "
        "amp.register_half_function(module, name)."
    )
