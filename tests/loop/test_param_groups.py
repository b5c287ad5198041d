"""What an optimizer may hold, and how it may change: groups, frozen weights, other optimizers."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as t


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
@pytest.mark.parametrize("after_backward", [False, True])
def test_a_group_added_later_trains_like_one_from_the_start(level, after_backward):
    runs = []
    for late in (True, False):
        model = t.net()
        optimizer = t.sgd(model[0].parameters() if late else model.parameters())
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0
        )
        data = list(t.batches(3))
        if not after_backward and late:
            optimizer.add_param_group({"params": list(model[2].parameters())})
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            model.zero_grad()
            t.backward(model, optimizer, x, y)
            if late and after_backward and number == 0:
                optimizer.add_param_group({"params": list(model[2].parameters())})
                optimizer.zero_grad()
                t.backward(model, optimizer, x, y)
            optimizer.step()
        runs.append(t.masters(optimizer))
    assert t.same(*runs)


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_a_frozen_parameter_trains_once_it_is_unfrozen(level):
    model = t.net()
    model[0].requires_grad_(False)
    model, optimizer = t.prepared(level, model=model, loss_scale=8.0)
    before = t.values(model[0].parameters())
    t.train_step(model, optimizer, *t.batch())
    assert t.same(before, t.values(model[0].parameters()))
    model[0].requires_grad_(True)
    for x, y in t.batches(3):
        t.train_step(model, optimizer, x, y)
    assert not t.same(before, t.values(model[0].parameters()))
    assert all(param.dtype is torch.float32 for param in amp.master_params(optimizer))


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_groups_keep_their_identity_and_options(level):
    model = t.net()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    own, inside = optimizer.param_groups, list(optimizer.param_groups)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert optimizer.param_groups is own
    assert all(a is b for a, b in zip(own, inside, strict=True))
    assert [group["lr"] for group in own] == [0.5, 0.1]


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_one_loss_for_two_optimizers_trains_like_one_over_all(level):
    runs = []
    for several in (True, False):
        model = t.net()
        parts = [model[0], model[2]]
        optimizers = (
            [t.sgd(each.parameters()) for each in parts] if several else [t.sgd(model.parameters())]
        )
        model, optimizers = amp.initialize(
            model, optimizers, opt_level=level, verbosity=0, loss_scale=8.0
        )
        for x, y in t.batches(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with amp.scale_loss(t.loss_of(model, x, y), optimizers) as scaled:
                scaled.backward()
            for optimizer in optimizers:
                optimizer.step()
        runs.append([m for each in optimizers for m in t.masters(each)])
    assert t.same(*runs)


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_an_optimizer_inside_another_steps_the_masters(level):
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})
            self.param_groups = inner.param_groups

        def step(self, closure=None):
            return self.inner.step(closure)

    runs = []
    for wraps in (True, False):
        make = (lambda p: Around(t.sgd(p))) if wraps else t.sgd
        model, optimizer = t.prepared(level, make, loss_scale=8.0)
        for x, y in t.batches(3):
            t.train_step(model, optimizer, x, y)
        runs.append(t.values(model.parameters()))
    assert t.same(*runs)


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_sparse_gradients_train(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    model, optimizer = t.prepared(level, model=model, loss_scale=8.0)
    before = t.masters(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.tensor([[0, 1], [1, 1]])).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    after = t.masters(optimizer)
    changed = (before[0] != after[0]).any(1).tolist()
    assert changed == [True, True, False, False, False]


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_channels_last_trains_alike(level):
    runs = []
    for moved in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        model, optimizer = t.prepared(level, t.fused_adamw_of, model=model, loss_scale=8.0)
        if moved:
            model = model.to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        t.train_step(model, optimizer, x, torch.zeros(2, 2))
        runs.append(t.masters(optimizer))
    for one, other in zip(*runs, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
