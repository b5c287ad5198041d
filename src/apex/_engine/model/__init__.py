"""Model conversion and restoration: dtypes of parameters, inputs and outputs; fp32 state dicts."""

from apex._engine.model.checks import check as check
from apex._engine.model.checks import check_optimizer as check_optimizer
from apex._engine.model.checks import refuse_inference_mode as refuse_inference_mode
from apex._engine.model.convert import convert as convert
from apex._engine.model.convert import convert_late as convert_late
from apex._engine.model.convert import floating_tensors as floating_tensors
from apex._engine.model.convert import hand_over as hand_over
from apex._engine.model.convert import set_region as set_region
from apex._engine.model.module_class import begin_call as begin_call
from apex._engine.model.module_class import end_call as end_call
from apex._engine.model.notes import log_lost as log_lost
from apex._engine.model.notes import mixes_dtypes as mixes_dtypes
from apex._engine.model.plan import ModelPlan as ModelPlan
from apex._engine.model.state import is_converted as is_converted
from apex._engine.model.state import restore as restore
from apex._engine.model.state import state_of as state_of
from apex._engine.model.state import undo_convert as undo_convert
