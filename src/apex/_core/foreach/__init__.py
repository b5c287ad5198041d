"""Optimizer rules and norms over lists of tensors, on torch's fused and foreach kernels.

The rules update parameters and state in place; the caller owns the state.
"""
