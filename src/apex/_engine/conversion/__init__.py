"""Model conversion and restoration: dtypes of parameters, inputs and outputs; fp32 state dicts."""

from apex._engine.conversion.casts import restore as restore
from apex._engine.conversion.casts import undo_convert as undo_convert
from apex._engine.conversion.checks import check as check
from apex._engine.conversion.checks import check_optimizer as check_optimizer
from apex._engine.conversion.checks import refuse_inference_mode as refuse_inference_mode
from apex._engine.conversion.convert import convert as convert
from apex._engine.conversion.convert import convert_late as convert_late
from apex._engine.conversion.convert import floating_tensors as floating_tensors
from apex._engine.conversion.convert import hand_over as hand_over
from apex._engine.conversion.convert import set_region as set_region
from apex._engine.conversion.notes import log_lost as log_lost
from apex._engine.conversion.notes import mixes_dtypes as mixes_dtypes
from apex._engine.conversion.plan import ModelPlan as ModelPlan
from apex._engine.conversion.state import is_converted as is_converted
from apex._engine.conversion.state import state_of as state_of
from apex._engine.conversion.subclass import begin_call as begin_call
from apex._engine.conversion.subclass import end_call as end_call
