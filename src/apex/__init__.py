"""Mixed precision for PyTorch through NVIDIA apex's interface: ``from apex import amp``.

Subpackages are available as attributes too (``import apex; apex.optimizers.FusedAdam(...)``):
``amp`` is imported eagerly, the others on first use. Where NVIDIA's apex is installed, its own
``apex/__init__.py`` runs in place of this file (``_apex_amp.py``).
"""

import importlib
from types import ModuleType

from apex import amp, debug
from apex._core import project

__version__ = project.VERSION

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
