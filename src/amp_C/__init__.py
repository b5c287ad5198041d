"""apex's multi-tensor functions, with the names and argument orders of its compiled extension.

Each takes ``(chunk_size, noop_flag, tensor_lists, ...)``. ``chunk_size`` (elements per thread block
in apex) is ignored. ``noop_flag`` is one int32 element on the tensors' device. Functions that check
for inf and NaN set it to 1 without a host sync and never reset it; functions documented as such do
nothing if it is set. ``tensor_lists`` contain tensors of one device and any floating-point dtypes;
each position is one parameter. All functions compute in fp32 (fp64 for fp64 tensors) and round
once.

Arguments of one name mean the same in each: ``step`` counts from 1, ``bias_correction`` is 1 or 0,
``mode`` is 0 for weight decay in the gradient, 1 for decoupled decay. The weight of a gradient in
its average is ``1 - beta1`` if ``grad_averaging`` is 1, else 1. ``inv_scale``, one element, is the
reciprocal of the loss scale. Learning rates and scales may be tensors of one element, which stay on
the device.
"""

from amp_C.lamb import *  # noqa: F403 - every name in its __all__ is of apex's module
from amp_C.norms import *  # noqa: F403
from amp_C.scaling import *  # noqa: F403
from amp_C.steps import *  # noqa: F403
