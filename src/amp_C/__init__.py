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

from amp_C.adam import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
)
from amp_C.l2norm import (
    multi_tensor_l2norm,
    multi_tensor_l2norm_mp,
    multi_tensor_l2norm_scale,
    multi_tensor_unscale_l2norm,
)
from amp_C.lamb import (
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
)
from amp_C.scaling import multi_tensor_axpby, multi_tensor_scale, update_scale_hysteresis
from amp_C.updates import multi_tensor_adagrad, multi_tensor_novograd, multi_tensor_sgd

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
