"""Optimizer rules over lists of tensors, on torch's fused and foreach kernels.

The rules update parameters and state in place; the caller owns the state. They are not in
``apex.optimizers``, which may be NVIDIA's while ``amp_C`` is ours.
"""
