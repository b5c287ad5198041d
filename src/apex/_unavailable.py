"""Modules and names of apex that this package lacks: their errors name an alternative.

`install` appends a finder to ``sys.meta_path``, so that it only sees modules that nothing else
provides. The error is a ModuleNotFoundError, and so an ImportError, which libraries with an
optional import of apex catch. `importlib.util.find_spec` also raises it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

_SDPA = "torch.nn.functional.scaled_dot_product_attention"
_SHARDED = (
    "torch.distributed.fsdp.fully_shard or torch.distributed.optim.ZeroRedundancyOptimizer with "
    "an optimizer of apex.optimizers"
)
_BATCH_NORM = "apex.parallel.SyncBatchNorm on channels_last tensors"
PARAMETRIZATION = (
    "apply_weight_norm and remove_weight_norm, or torch.nn.utils.parametrize."
    "register_parametrization for a rule of your own"
)
"""What replaces the classes of apex.reparameterization."""

INSTEAD: Mapping[str, str] = {
    "apex.transformer": "Megatron-LM's megatron.core, to which these modules have moved",
    "apex._pickle": "the version of apex that wrote this file, and save its state_dict() there",
    "apex.pyprof": "torch.profiler, or torch.autograd.profiler.emit_nvtx with Nsight",
    "apex.amp._process_optimizer": "amp.initialize, which gives optimizers a subclass",
    "apex.contrib.bottleneck": "torchvision's resnet.Bottleneck in channels_last",
    "apex.contrib.conv_bias_relu": "torch.nn.Conv2d and ReLU, which torch.compile fuses",
    "apex.contrib.cudnn_gbn": _BATCH_NORM,
    "apex.contrib.fmha": f"{_SDPA}, or torch.nn.attention.varlen for packed sequences",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds.GdsFile",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": _BATCH_NORM,
    "apex.contrib.index_mul_2d": "a[index] * b, which torch.compile fuses",
    "apex.contrib.multihead_attn": f"torch.nn.MultiheadAttention, or {_SDPA}",
    "apex.contrib.nccl_allocator": "torch.cuda.MemPool with the NCCL backend's mem_allocator",
    "apex.contrib.nccl_p2p": "torch.distributed.batch_isend_irecv",
    "apex.contrib.openfold_triton": f"torch.nn.LayerNorm and {_SDPA}",
    "apex.contrib.optimizers.distributed_fused_adam": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_adam_v2": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_adam_v3": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_lamb": _SHARDED,
    "apex.contrib.peer_memory": "torch.distributed.batch_isend_irecv",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured, or torchao's sparsity",
    "apex.contrib.torchsched": "torch.compile",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.parallel.optimized_sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.parallel.sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.reparameterization.Reparameterization": PARAMETRIZATION,
    "apex.reparameterization.WeightNorm": PARAMETRIZATION,
    "apex.reparameterization.apply_reparameterization": PARAMETRIZATION,
    "apex.reparameterization.remove_reparameterization": PARAMETRIZATION,
    "apex.reparameterization.reparameterization": PARAMETRIZATION,
    "apex.reparameterization.weight_norm": PARAMETRIZATION,
}
"""What to use instead, by the name of a module, or of what a package's users import from it."""


class UnavailableFinder:
    """Raises for the modules in `INSTEAD` and finds no others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Returns None for any other module.

        Raises:
            ModuleNotFoundError: If ``fullname`` is a module of apex that this package lacks.
        """
        if fullname in INSTEAD:
            # No `name`: `from apex import x` would replace an error that names x with its own.
            raise ModuleNotFoundError(
                f"{fullname} is not part of this apex: use {INSTEAD[fullname]}."
            )


def names_instead(
    module: str, instead: Mapping[str, str], *, others: str = ""
) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, whose errors name what to use ``instead`` of a name.

    ``others`` names what to use instead of any other public name.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes a module's __getattr__
        general = "" if name.startswith("_") else others
        use = instead.get(name, general)
        if use:
            raise AttributeError(f"{module}.{name} is not part of this apex: use {use}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def install() -> None:
    """Registers the finder; idempotent."""
    if not any(isinstance(finder, UnavailableFinder) for finder in sys.meta_path):
        sys.meta_path.append(UnavailableFinder())
