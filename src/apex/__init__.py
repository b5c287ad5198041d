"""Mixed precision for PyTorch through NVIDIA apex's interface: ``from apex import amp``.

Subpackages are available as attributes too (``import apex; apex.amp.initialize(...)``), imported on
first use: a package that imports its subpackages deadlocks where threads import both. Where
NVIDIA's apex is installed, its ``apex/__init__.py`` runs in place of this file (``_apex_amp.py``).
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
