"""Linear layers with bias and GELU, in one call; torch.compile fuses them."""

from apex.fused_dense.fused_dense import *  # noqa: F403 - its __all__ is apex's module
