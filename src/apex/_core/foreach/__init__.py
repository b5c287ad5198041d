"""Norms and copies of lists of tensors, on torch's foreach kernels."""
