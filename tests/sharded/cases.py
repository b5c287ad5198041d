"""What the tests of sharded models share: nets on a mesh, whole values, the same run unsharded."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb
from tests.training import cases

SCALE = {"loss_scale": "dynamic", "growth_interval": 2, "max_loss_scale": 2.0**12}
"""Every level with a dynamic scale that moves within a few steps.

It stays small: ``fully_shard`` sums half of the gradients of four ranks, and in fp16 their sum
overflows at half the scale at which one rank's does.
"""

OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2, max_grad_norm=0.1),
    "FusedMixedPrecisionLamb": lambda params: FusedMixedPrecisionLamb(
        params, lr=1e-2, max_grad_norm=0.1
    ),
}


def net(seed=0):
    """A net whose last bias has two rows: on four ranks two of them hold nothing of it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))


def mesh(*shape, names=None):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model, over, **options):
    """The model with its layers, and itself, sharded; in place."""
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def sharded(level, world_size, make_optimizer=None, model=None, fsdp=None, **options):
    """A net sharded over all ranks, and its optimizer, through ``amp.initialize``."""
    model = shard(net() if model is None else model, mesh(world_size), **fsdp or {})
    return prepared(level, model, make_optimizer, **options)


def prepared(level, model, make_optimizer=None, **options):
    make_optimizer = make_optimizer or OPTIMIZERS["fused AdamW"]
    options = {**SCALE, "opt_level": level, "verbosity": 0, **options}
    return amp.initialize(model, make_optimizer(model.parameters()), **options)


class Parallel(nn.Module):
    """Two layers and a norm, as tensor parallelism splits them: columns, rows, and a sequence."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
            self.head = nn.Linear(4, 2)

    def forward(self, x):
        # A clone: fully_shard warns of outputs that are views, as those of tensor parallelism are.
        return self.head(self.norm(self.down(torch.tanh(self.up(x))))).clone()


def in_parallel(over):
    """The net split over a dimension of a mesh; the norm's gradients are sums still to be taken."""
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return parallelize_module(Parallel(), over, plan)


def master_of(model, optimizer, name):
    names = [known for known, _ in model.named_parameters()]
    return dict(zip(names, amp.master_params(optimizer), strict=True))[name]


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def wholes(tensors):
    return [whole(tensor) for tensor in tensors]


def state_of(optimizer):
    """The optimizer's state, whole, in the order of its parameters."""
    return [
        {name: whole(value) for name, value in sorted(state.items())}
        for state in optimizer.state_dict()["state"].values()
    ]


def run(model, optimizer, batches):
    """Trains; returns weights, masters, optimizer state and amp's own, whole."""
    for x, y in batches:
        cases.train_step(model, optimizer, x, y)
    return outcome(model, optimizer)


def outcome(model, optimizer):
    return {
        "weights": wholes(model.parameters()),
        "masters": wholes(amp.master_params(optimizer)),
        "optimizer": state_of(optimizer),
        "amp": list(amp.state_dict().values())[-1],  # older sessions wait for the collector
    }


def close(first, second):
    """Whether nestings agree but for the last bits, in which kernels on other pieces may differ.

    A gradient that was not shared, or not divided by the scale, is off by far more.
    """
    if isinstance(first, torch.Tensor):
        eps = torch.finfo(first.dtype).eps
        return first.dtype is second.dtype and torch.allclose(
            first, second, rtol=16 * eps, atol=16 * eps
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(close(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(close, first, second))
    return bool(first == second)
