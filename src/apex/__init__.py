"""Mixed precision for PyTorch by NVIDIA apex's interface: ``from apex import amp``.

Scripts reach the parts as attributes too (``import apex; apex.optimizers.FusedAdam(...)``): ``amp``
is imported here, the others when they are first asked for.
"""

import importlib
import os
import sys
from types import ModuleType

from apex import _conflict, _unavailable

# Before anything else of the package: with foreign files in the folder, the imports below may fail
# in ways that say nothing of the cause.
_conflict.check(os.path.dirname(os.path.abspath(__file__)))
_unavailable.install()

from apex import amp, debug  # noqa: E402 - after the check

# The tools stand above amp, and are reached through it: amp.debug, import apex.amp.debug.
amp.debug = debug  # type: ignore[attr-defined]
sys.modules["apex.amp.debug"] = debug

__version__ = "0.1.0"  # that of pyproject.toml; importlib.metadata would cost time at each import

__all__ = [
    "RNN",
    "__version__",
    "amp",
    "contrib",
    "debug",
    "fp16_utils",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "reparameterization",
]

_LAZY = frozenset(__all__) - {"__version__", "amp", "debug"}


def __getattr__(name: str) -> ModuleType:
    """Imports a part of the package when it is first asked for."""
    if name in _LAZY:
        return importlib.import_module(f"apex.{name}")
    raise AttributeError(f"module 'apex' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the parts that are not imported yet, too."""
    return sorted({*globals(), *_LAZY})
