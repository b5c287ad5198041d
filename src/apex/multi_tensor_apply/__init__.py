"""apex's interface to its multi-tensor functions (``amp_C``)."""

from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)
"""The instance that scripts use; ``multi_tensor_applier.available`` is always True."""

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
