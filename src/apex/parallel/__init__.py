"""Distributed training: data parallelism, synchronized batch norm and LARC.

Importing this package starts no communication, and works if torch was built without it.
"""

import torch

from apex.parallel.distributed import DistributedDataParallel, Reducer, reduce_in_fp32
from apex.parallel.LARC import LARC
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm, convert_syncbn_model
from apex.parallel.process_groups import create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "reduce_in_fp32",
]

if torch.distributed.is_available():
    from torch.distributed import ReduceOp

    __all__ += ["ReduceOp"]
