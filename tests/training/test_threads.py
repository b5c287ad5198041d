"""Sessions that live and die beside the steps of other optimizers, in other threads too."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from apex import amp


def train(level, seed, steps=12, *, scaled=True):
    """Trains a model of its own; returns its losses and masters."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 4, generator=generator)
        loss = model(x).float().pow(2).mean()
        if scaled:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [master.detach().clone() for master in amp.master_params(optimizer)]


@pytest.mark.filterwarnings("ignore:fp16 is emulated")
def test_models_that_train_in_threads_of_their_own_train_as_alone():
    jobs = [("O2", True), ("O4", True), ("O4", False), ("O5", True), ("O5", False)] * 3
    expected = [train(level, i, scaled=scaled) for i, (level, scaled) in enumerate(jobs)]
    found, interval = {}, sys.getswitchinterval()

    def work(i, level, scaled):
        found[i] = train(level, i, scaled=scaled)

    sys.setswitchinterval(2e-5)
    try:
        threads = [threading.Thread(target=work, args=(i, *job)) for i, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for i, (losses, masters) in enumerate(expected):
        assert found[i][0] == losses
        assert all(map(torch.equal, found[i][1], masters))


@pytest.mark.parametrize("change", ["begins", "ends"])
def test_a_session_may_begin_or_end_while_torch_calls_the_hooks_of_a_step(change):
    """Another thread may do it there, or a garbage collection."""

    def session():
        model = nn.Linear(2, 2)
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        return amp.initialize(model, made, opt_level="O5", verbosity=0)

    def hook(*_):
        if change == "begins":
            living.append(session())
        else:
            living.clear()
            gc.collect()

    living = [session(), session()]
    stepped = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([stepped], lr=0.1)
    hooks = [register_optimizer_step_post_hook(each) for each in (hook, lambda *_: None)]
    try:
        for _ in range(2):
            stepped.grad = torch.ones(2)
            optimizer.step()
    finally:
        for each in hooks:
            each.remove()
    assert torch.allclose(stepped, torch.full((2,), 0.8))
