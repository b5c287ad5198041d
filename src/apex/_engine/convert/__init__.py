"""Model conversion: dtypes of parameters, inputs and outputs, fp32 ``state_dict``, and the undo."""

from apex._engine.convert.change import convert, restore, set_region
from apex._engine.convert.checks import check
from apex._engine.convert.plan import MasterSource, ModelPlan, Region
from apex._engine.convert.state import is_converted, owner_of

__all__ = [
    "MasterSource",
    "ModelPlan",
    "Region",
    "check",
    "convert",
    "is_converted",
    "owner_of",
    "restore",
    "set_region",
]
