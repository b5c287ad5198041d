"""A small net, sharded over all ranks by ``fully_shard``."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def net(seed=0):
    """A net whose last bias has two rows: on four ranks two of them hold nothing of it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))


def mesh(*shape, names=None):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole(model):
    """The parameters, each as one tensor."""
    params = model.parameters()
    return [getattr(p, "full_tensor", p.clone)().detach().clone() for p in params]


def shard(model, over, **options):
    """The model with its layers, and itself, sharded; in place."""
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)
