"""See what reduced precision does to a model: ``amp.debug``."""

from __future__ import annotations

import importlib
from typing import Any

# Name to the module that holds it, loaded when first asked for: training scripts that never debug
# pay nothing. No module has the name of what it holds, for importing it would hide that.
_PLACES = {
    "History": "history",
    "arm": "auto_trace",
    "check_numerics": "numerics",
    "explain": "explaining",
    "frozen_updates": "frozen",
    "trace_overflow": "overflow",
    "why_skipped": "skips",
}

__all__ = [  # noqa: PLE0604 - the keys are strings
    *_PLACES,
]


def __getattr__(name: str) -> Any:
    """Loads the module of a public name, and keeps the name."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"apex.debug has no {name!r}; it has {', '.join(_PLACES)}.")
    value = getattr(importlib.import_module(f"{__name__}.{place}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Names the public functions, loaded or not."""
    return [*globals(), *_PLACES]
