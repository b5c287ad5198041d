"""What a tensor subclass needs from torch to change a call and pass it on."""

from __future__ import annotations

import torch

# No plain form: torch's guide to extending it names no other way to call a function as it is.
without_overrides = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of ``Tensor`` do not see calls of torch's functions.

Without it, torch searches masters, which are of a subclass, for overrides at every access to
``grad`` and at every operator: 7 % of the instructions of an iteration of 150 tiny layers at O2
(torch 2.13, CPU).
"""

without_functions = torch._C.DisableTorchFunction
"""A context in which function modes do not see calls of torch's functions, either."""
