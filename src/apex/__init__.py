"""Mixed precision for PyTorch through NVIDIA apex's interface: ``from apex import amp``.

Subpackages are also available as attributes (``import apex; apex.amp.initialize(...)``). They are
imported on first use, because importing them here can deadlock if another thread imports one. If
NVIDIA's apex is installed, its ``apex/__init__.py`` runs instead of this file (``_apex_amp.py``).
"""

import importlib
from types import ModuleType

from apex import _requirements, _unavailable
from apex._core import project

_requirements.check()
_unavailable.install()

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

_LAZY = frozenset(__all__) - {"__version__"}


def __getattr__(name: str) -> ModuleType:
    """Imports a subpackage on first use."""
    if name in _LAZY:
        return importlib.import_module(f"apex.{name}")
    raise AttributeError(f"module 'apex' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists all subpackages, imported or not."""
    return sorted({*globals(), *_LAZY})
