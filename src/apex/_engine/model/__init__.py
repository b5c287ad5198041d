"""Model conversion and restoration: dtypes of parameters, inputs and outputs; fp32 state dicts."""

from apex._engine.model.checks import check, check_restorable
from apex._engine.model.convert import (
    convert,
    convert_late,
    floating_tensors,
    hand_over,
    restore,
    set_region,
    undo_convert,
)
from apex._engine.model.messages import log_lost, mixes_dtypes
from apex._engine.model.module_class import begin_call, end_call
from apex._engine.model.plan import ModelPlan
from apex._engine.model.state import assign, is_converted, module_behind, state_of

__all__ = [
    "ModelPlan",
    "assign",
    "begin_call",
    "check",
    "check_restorable",
    "convert",
    "convert_late",
    "end_call",
    "floating_tensors",
    "hand_over",
    "is_converted",
    "log_lost",
    "mixes_dtypes",
    "module_behind",
    "restore",
    "set_region",
    "state_of",
    "undo_convert",
]
