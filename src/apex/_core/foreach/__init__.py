"""Optimizer rules and norms over lists of tensors, on torch's fused and foreach kernels."""
