"""torch's function modes, entered and left so that an interrupt leaves none behind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

# No plain form: a mode that stayed behind would slow down every call of torch's.
push_function_mode: Callable[[TorchFunctionMode], None] = torch.overrides._push_mode
"""Makes this thread's calls of torch's functions go through a mode."""


def function_modes() -> int:
    """Returns how many function modes this thread is in."""
    return torch._C._len_torch_function_stack()


def leave_function_modes(count: int) -> None:
    """Leaves the newest modes until ``count`` are left; may be called again."""
    while function_modes() > count:
        torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
