"""The parts of apex's contrib that scripts use, on torch's operators."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Imports ``optimizers`` on first use: OpenNMT-py reads it as an attribute."""
    if name == "optimizers":
        return importlib.import_module("apex.contrib.optimizers")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
