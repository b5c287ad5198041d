"""All uses of torch's private interfaces and of those that differ between releases.

Each private name is used in one file, with a plain form where a release lacks it. Copies between
devices are also here, as torch determines which of them are asynchronous. So are the values of
gradients, which DTensors and sparse tensors hold in forms of their own.
"""
