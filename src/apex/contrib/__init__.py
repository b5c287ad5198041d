"""Parts of apex's contrib that scripts use, with torch's operators.

Each is available as an attribute too, imported on first use.
"""

import importlib
from types import ModuleType

__all__ = ["clip_grad", "layer_norm", "optimizers", "xentropy"]


def __getattr__(name: str) -> ModuleType:
    """Imports a subpackage on first use."""
    if name in __all__:
        return importlib.import_module(f"apex.contrib.{name}")
    raise AttributeError(f"module 'apex.contrib' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists all subpackages, imported or not."""
    return sorted({*globals(), *__all__})
