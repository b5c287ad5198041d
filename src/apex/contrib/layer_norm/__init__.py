"""Layer norm over the last dimension, under the name of apex's tuned kernels."""

from apex.contrib.layer_norm.layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
