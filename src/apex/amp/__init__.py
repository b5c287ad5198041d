"""Automatic mixed precision: ``initialize``, ``scale_loss``, and the levels O0 to O5."""

import sys

from apex import _requirements, _unavailable

# As in apex/__init__.py, which may be NVIDIA's.
_requirements.check()
_unavailable.install()

from apex.amp import (  # noqa: F401 - reached as attributes
    compat,
    lists,
    opt,
    rnn_compat,
    scaler,
    utils,
    wrap,
)
from apex.amp._amp_state import _amp_state
from apex.amp.amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from apex.amp.frontend import initialize, load_state_dict, restore, state_dict
from apex.amp.handle import disable_casts, scale_loss
from apex.amp.optimizers import master_params
from apex.amp.steps import clip_grad_norm_, step_was_skipped

# A layer above, which reads this one: after it. Users reach it as amp.debug and apex.amp.debug.
from apex import debug  # isort: skip

sys.modules["apex.amp.debug"] = debug

__all__ = [
    "_amp_state",
    "bfloat16_function",
    "clip_grad_norm_",
    "debug",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "restore",
    "scale_loss",
    "state_dict",
    "step_was_skipped",
]
