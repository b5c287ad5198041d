"""Optimizer rules and norms over lists of tensors, on torch's fused and foreach kernels.

The rules step parameters and state in place; what they keep belongs to the caller.
"""
