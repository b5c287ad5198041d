"""What an optimizer keeps beside its groups, and scripts beside its parameters, goes to masters."""

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from apex import amp
from tests.support import training as cases


class Rates(Optimizer):
    """SGD whose rate ``times`` looks up for each parameter, wherever the optimizer keeps it."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.keep(params)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * self.times(param))


class ByParam(Rates):
    def keep(self, params):
        self.factors = {param: index for index, param in enumerate(params)}

    def times(self, param):
        return self.factors[param]


class InASet(Rates):
    def keep(self, params):
        self.slow = {params[0], params[-1]}

    def times(self, param):
        return 0.1 if param in self.slow else 1.0


class OwnAttribute(Rates):
    def keep(self, params):
        for index, param in enumerate(params):
            param.times = index

    def times(self, param):
        return getattr(param, "times", 1.0)


class Container(Optimizer):
    """Optimizers as one; each has groups of its own (torchtitan's OptimizersContainer)."""

    def __init__(self, params, make=lambda params: SGD(params, lr=0.1, momentum=0.9)):
        params = list(params)
        super().__init__(params, {})
        self.optimizers = [make(params[:2]), make(params[2:])]

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def inner(self):
        return [
            p for each in self.optimizers for group in each.param_groups for p in group["params"]
        ]


class Counting(SGD):
    """Keeps a number in its state, beside that of its parameters (SPAM)."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["steps"] = 0

    def step(self, closure=None):
        self.state["steps"] += 1
        return super().step(closure)


def trained(make, level, **options):
    model, optimizer = cases.prepared(level, make, **options)
    for x, y in cases.batches(3):
        cases.train_step(model, optimizer, x, y)
    return model, optimizer


@pytest.mark.parametrize("kind", [ByParam, InASet, OwnAttribute])
@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_an_optimizer_finds_masters_where_it_kept_its_parameters(level, kind):
    model, optimizer = trained(kind, level, loss_scale=128.0)
    expected, _ = trained(kind, "O0")
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0.0, atol=2e-3)
    rates = [optimizer.times(param) for param in amp.master_params(optimizer)]
    amp.restore(model, optimizer)
    assert [optimizer.times(param) for param in model.parameters()] == rates


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_optimizers_inside_another_step_masters(level):
    model, optimizer = trained(Container, level)
    other = trained(lambda params: SGD(params, lr=0.1, momentum=0.9), level)
    assert cases.same(model.state_dict(), other[0].state_dict())
    assert all(a is b for a, b in zip(optimizer.inner(), amp.master_params(optimizer), strict=True))
    amp.restore(model, optimizer)
    assert all(a is b for a, b in zip(optimizer.inner(), model.parameters(), strict=True))


@pytest.mark.parametrize("arrives", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_optimizers_inside_another_continue_from_their_state(level, arrives):
    model, alone = cases.net().to(arrives), cases.net().to(arrives)
    optimizer = Container(model.parameters(), lambda params: Adam(params, lr=0.01))
    other = Adam(alone.parameters(), lr=0.01)
    for x, y in cases.batches(2):
        for each in (optimizer, *optimizer.optimizers, other):
            each.zero_grad()
        cases.loss_of(model, x.to(arrives), y).backward()
        cases.loss_of(alone, x.to(arrives), y).backward()
        optimizer.step()
        other.step()
    for pair in ((model, optimizer), (alone, other)):
        amp.initialize(*pair, opt_level=level, verbosity=0)
        cases.train_step(*pair, *cases.batch(seed=3))
    assert cases.same(model.state_dict(), alone.state_dict())


def test_an_overflow_skips_the_optimizers_inside():
    model, optimizer = cases.prepared("O2", Container)
    before = cases.masters(optimizer)
    cases.train_step(model, optimizer, *cases.overflowing())
    assert cases.same(cases.masters(optimizer), before)
    assert not any(each.state for each in optimizer.optimizers)
    cases.train_step(model, optimizer, *cases.batch())
    assert not cases.same(cases.masters(optimizer), before)


class InBackward(Container):
    """Steps in hooks of the backward pass (torchtitan's OptimizersInBackwardContainer)."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params)
        for optimizer, own in zip(self.optimizers, (params[:2], params[2:]), strict=True):
            own[0].register_post_accumulate_grad_hook(lambda _, inner=optimizer: inner.step())

    def step(self, closure=None):
        """Does nothing."""


def plain_backward(model, optimizer, x, y):
    cases.loss_of(model, x, y).backward()
