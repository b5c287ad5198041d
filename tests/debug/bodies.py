"""Modules for tests that plant one line in a model, and what tools leave as it was."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as modules

from tests.support.loops import Body as Body
from tests.support.loops import grads


class Exp(nn.Module):
    def forward(self, x):
        return x.exp()


def overflowing_net():
    net = nn.Sequential(nn.Linear(2, 2), Exp())
    nn.init.constant_(net[0].weight, 60.0)
    return net


def everything(model):
    """What a run could change: values, gradients, mode, hooks, random numbers, casts."""
    hooks = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": grads(model.parameters()),
        "training": [module.training for module in model.modules()],
        "hooks": [len(getattr(m, name)) for m in model.modules() for name in hooks],
        "global": len(modules._global_forward_hooks),
        "random": [torch.get_rng_state(), torch.tensor(random.getstate()[1])],
        "numpy": repr(np.random.get_state()),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()],
    }
