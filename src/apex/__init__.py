"""Mixed precision for PyTorch by NVIDIA apex's interface: ``from apex import amp``.

Scripts reach the parts as attributes too (``import apex; apex.amp.initialize(...)``), so ``amp``
and ``parallel`` are imported here; both cost little over ``import torch``.
"""

import os

from apex import _conflict

# Before anything else of the package: with foreign files in the folder, the imports below may fail
# in ways that say nothing of the cause.
_conflict.check(os.path.dirname(os.path.abspath(__file__)))

from apex import amp, parallel  # noqa: E402 - after the check

__version__ = "0.1.0"  # that of pyproject.toml; importlib.metadata would cost time at each import

__all__ = ["__version__", "amp", "parallel"]
