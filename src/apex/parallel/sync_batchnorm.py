"""The name of apex's Python implementation of synchronized batch norm; there is one class here."""

from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
