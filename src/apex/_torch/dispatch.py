"""What torch's dispatcher knows of operators and their kernels.

No plain form: what autocast covers on a device is the ground that op casts stand on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

has_operator: Callable[[str], bool] = torch._C._dispatch_has_kernel
"""Returns whether this torch has an operator, such as ``"aten::exp"``."""

has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Returns whether an operator has a kernel for a dispatch key, such as ``"AutocastCPU"``."""
