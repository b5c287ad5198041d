"""Gradients summed in fp32 under torch's own DistributedDataParallel."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from apex.parallel.distributed import DistributedDataParallel
from apex.parallel.gradient_reduction import GradientReduction


def reduce_in_fp32(model: TorchDistributedDataParallel) -> None:
    """Makes torch's DistributedDataParallel send and average 16-bit gradients in fp32.

    At O2, O3 and O5 the wrapper otherwise adds them in 16 bits, and rounds once per addition. Here
    each rank's gradient goes to fp32, the ranks' mean is taken in fp32, and only the mean is
    rounded. Gradients are sent in 4 bytes an element instead of 2; those in fp32 are averaged as
    before. Call it once, after wrapping the model and before the first backward pass: it registers
    a communication hook, and a wrapper takes one.

    Args:
        model: A model in ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        TypeError: For anything else.
        RuntimeError: If the wrapper has a communication hook already.

    Example:
        Each process of a script::

            model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
            model = torch.nn.parallel.DistributedDataParallel(model)
            apex.parallel.reduce_in_fp32(model)
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "reduce_in_fp32 got apex.parallel.DistributedDataParallel, which has an option for "
            "this: DistributedDataParallel(model, allreduce_always_fp32=True)."
        )
    if not isinstance(model, TorchDistributedDataParallel):
        raise TypeError(
            f"reduce_in_fp32 got {type(model).__name__}; it takes a model that is wrapped in "
            "torch.nn.parallel.DistributedDataParallel. Call amp.initialize, wrap the model, and "
            "pass the wrapper. For fully_shard use MixedPrecisionPolicy(reduce_dtype="
            "torch.float32)."
        )
    reduction = GradientReduction(model.process_group, always_fp32=True)
    # torch checks the annotations of hooks and rejects strings; a lambda has none.
    model.register_comm_hook(reduction, lambda state, bucket: state.in_background(bucket))
