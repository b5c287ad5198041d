"""apex's ``apex_C``: flattens dense tensors into one tensor, and back."""

from apex._core.flat import flatten, unflatten

__all__ = ["flatten", "unflatten"]
