"""Enters and exits torch function modes so that an interrupt leaves none active."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

# No fallback: a mode left active would slow down every call to torch.
push_function_mode: Callable[[TorchFunctionMode], None] = torch._C._push_on_torch_function_stack
"""Activates a mode for this thread's calls to torch functions."""

_pop: Callable[[], TorchFunctionMode] = torch._C._pop_torch_function_stack

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Returns the number of active function modes in this thread."""


def exit_function_modes(count: int) -> None:
    """Exits the newest modes until ``count`` remain; idempotent."""
    while function_modes() > count:
        _pop()
