"""Model conversion and restoration: dtypes of parameters, inputs and outputs; fp32 state dicts."""

from apex._engine.conversion.casts import convert_late, floating_tensors, restore, undo_convert
from apex._engine.conversion.checks import check, check_optimizer, refuse_inference_mode
from apex._engine.conversion.notes import log_lost
from apex._engine.conversion.state import is_converted, set_region
from apex._engine.conversion.subclass import convert, hand_over

__all__ = [
    "check",
    "check_optimizer",
    "convert",
    "convert_late",
    "floating_tensors",
    "hand_over",
    "is_converted",
    "log_lost",
    "refuse_inference_mode",
    "restore",
    "set_region",
    "undo_convert",
]
