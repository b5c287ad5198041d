"""MMEngine's wrapper and ours, a tiny net, and one iteration as MMEngine's models write it."""

import torch

from apex import amp
from tests.clients.libraries import need
from tests.support.steps import Net

need("mmengine.runner")
need("apex.integrations.mmengine")

from mmengine.optim import ApexOptimWrapper as Theirs  # noqa: E402 - after the check

from apex.integrations.mmengine import ApexOptimWrapper as Ours  # noqa: E402

WRAPPERS = (Ours, Theirs)
WRAPPER_IDS = ("ours", "mmengine")
LEVELS = ("O1", "O2", "O5")
WITH_MASTERS = ("O2", "O5")


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.125, "momentum": 0.5, **options})


def wrapped(kind, level, *, model=None, optimizer=None, **options):
    """Returns a fresh net and the wrapper ``kind`` around its optimizer."""
    model = net() if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    options = {"verbosity": 0, "loss_scale": 2.0**8, **options}
    return model, kind(optimizer=optimizer, opt_level=level, **options)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator)


def loss_of(model, x):
    return model(x).float().pow(2).mean()


def iterate(model, wrapper, steps=(0,)):
    """Trains ``steps`` iterations on batches of these numbers."""
    for step in steps:
        with wrapper.optim_context(model):
            loss = loss_of(model, batch(step))
        wrapper.update_params(loss)


def overflow(model, wrapper):
    """An iteration with gradients that are inf."""
    with wrapper.optim_context(model):
        loss = loss_of(model, batch(0)) * torch.inf
    wrapper.update_params(loss)


def values(wrapper):
    """What the optimizer steps: the fp32 masters where there are any."""
    return [param.detach().clone() for param in amp.master_params(wrapper.optimizer)]


def scale(wrapper, index=0):
    return wrapper.state_dict()["apex_amp"][f"loss_scaler{index}"]["loss_scale"]
