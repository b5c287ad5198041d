"""apex's name for its Python implementation of synchronized batch norm: the same class."""

from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
