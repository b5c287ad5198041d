"""Mixed precision for PyTorch through NVIDIA apex's interface: ``from apex import amp``.

Subpackages are available as attributes too (``import apex; apex.optimizers.FusedAdam(...)``):
``amp`` is imported eagerly, the others on first use.
"""

import importlib
import os
import sys
from types import ModuleType

from apex import _conflict, _requirements, _unavailable

# Runs first: if the folder holds another package's files, the imports below may fail with errors
# that hide the cause.
_conflict.check(os.path.dirname(os.path.abspath(__file__)))
_requirements.check()
_unavailable.install()

from apex import amp, debug  # noqa: E402 - after the check
from apex._core.version import VERSION  # noqa: E402

# The debug tools are a layer above amp, and users reach them as amp.debug or apex.amp.debug.
amp.debug = debug  # type: ignore[attr-defined]
sys.modules["apex.amp.debug"] = debug

__version__ = VERSION

__all__ = [
    "RNN",
    "__version__",
    "amp",
    "contrib",
    "debug",
    "fp16_utils",
    "fused_dense",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "reparameterization",
]

_LAZY = frozenset(__all__) - {"__version__", "amp", "debug"}


def __getattr__(name: str) -> ModuleType:
    """Imports a subpackage on first use."""
    if name in _LAZY:
        return importlib.import_module(f"apex.{name}")
    raise AttributeError(f"module 'apex' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists all subpackages, imported or not."""
    return sorted({*globals(), *_LAZY})
