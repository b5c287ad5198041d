"""apex's multi-tensor functions, by the names and argument orders of its compiled extension.

Each takes ``(chunk_size, noop_flag, tensor_lists, ...)``. ``chunk_size`` (elements per thread
block there) has no meaning here. ``noop_flag`` is one int32 element on the device of the tensors.
The functions that look for inf and NaN raise it to 1, without a host sync, and never lower it;
those that say so leave everything as it is where it is set. ``tensor_lists`` hold tensors of one
device and any floating dtypes, one position being one parameter: all is computed in fp32 (fp64 of
fp64 tensors) and rounded once.
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
