"""Tools that show what reduced precision does to a model: ``amp.debug``."""

from __future__ import annotations

import importlib
from typing import Any

# Each public name and its module, loaded on first use so that other scripts do not pay for it. No
# module shares its name with what it defines: importing the module would shadow the function.
_MODULES = {
    "History": "watch",
    "arm": "watch",
    "check_numerics": "check",
    "explain": "explaining",
    "frozen_updates": "check",
    "suggest_fp32": "suggest",
    "trace_overflow": "overflow",
    "trace_rounding": "rounding",
    "why_skipped": "check",
}

__all__ = [  # noqa: PLE0604 - the keys are strings
    *_MODULES,
]


def __getattr__(name: str) -> Any:
    """Loads a public name on first use and caches it."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"apex.debug has no {name!r}; it has {', '.join(_MODULES)}.")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists all public names, loaded or not."""
    return [*globals(), *_MODULES]
