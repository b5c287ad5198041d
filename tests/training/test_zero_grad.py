"""Clearing gradients: of the optimizer or the model, to None or to zero."""

import inspect

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedSGD
from tests.training import cases


def all_grads(model, optimizer):
    return [param.grad for param in (*model.parameters(), *amp.master_params(optimizer))]


@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_zero_grad_to_none_clears_model_and_masters(level, clear):
    model, optimizer = cases.prepared(level)
    cases.backward(model, optimizer, *cases.batch())
    {"optimizer": optimizer, "model": model}[clear].zero_grad(set_to_none=True)
    assert all(grad is None for grad in all_grads(model, optimizer))


@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_zero_grad_to_zero_zeroes_model_and_masters(level, clear):
    model, optimizer = cases.prepared(level)
    cases.backward(model, optimizer, *cases.batch())
    {"optimizer": optimizer, "model": model}[clear].zero_grad(set_to_none=False)
    assert all(grad is not None and not grad.any() for grad in all_grads(model, optimizer))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_every_way_of_clearing_trains_the_same(level, clear, set_to_none):
    usual, other = (cases.prepared(level, cases.OPTIMIZERS["Adam"]) for _ in range(2))
    for x, y in cases.batches(3):
        cases.train_step(*usual, x, y)
        model, optimizer = other
        {"optimizer": optimizer, "model": model}[clear].zero_grad(set_to_none=set_to_none)
        cases.backward(model, optimizer, x, y)
        optimizer.step()
    assert cases.same(cases.masters(usual[1]), cases.masters(other[1]))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_zero_grad_of_a_module_around_the_model_clears_masters_too(level):
    x, y = cases.batch(seed=2)
    model, optimizer = cases.prepared(level)
    cases.backward(model, optimizer, *cases.batch(seed=1))
    nn.Sequential(model).zero_grad()
    cases.backward(model, optimizer, x, y)
    optimizer.step()
    only, stepped = cases.prepared(level)
    cases.train_step(only, stepped, x, y)
    assert cases.same(cases.masters(optimizer), cases.masters(stepped))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_optimizer_that_keeps_zeros_steps_by_them(level):
    """As FusedSGD does by default: weights that the loss does not reach keep their momentum."""
    model, optimizer = cases.prepared(level, lambda p: FusedSGD(p, lr=0.1, momentum=0.9))
    cases.train_step(model, optimizer, *cases.batch())
    optimizer.zero_grad()
    assert all(grad is not None and not grad.any() for grad in all_grads(model, optimizer))
    before = cases.masters(optimizer)
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in amp.master_params(optimizer)]
    optimizer.step()
    expected = [p - 0.1 * 0.9 * momentum for p, momentum in zip(before, momenta, strict=True)]
    for param, value in zip(cases.masters(optimizer), expected, strict=True):
        torch.testing.assert_close(param, value.to(param.dtype))


class EverySecond(torch.optim.SGD):
    """Clears the gradients at every second call, to accumulate."""

    calls = 0

    def zero_grad(self, set_to_none=True):
        """Reads all gradients."""
        assert all(p.grad is not None for group in self.param_groups for p in group["params"])
        self.calls += 1
        if self.calls % 2 == 0:
            super().zero_grad(set_to_none)


class WithoutArguments(torch.optim.SGD):
    """As optimizers were written for torch 1.6."""

    def zero_grad(self):
        """Zeroes all gradients."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.detach_()
                    param.grad.zero_()


class KeepsByDefault(torch.optim.SGD):
    """Another default than torch's."""

    def zero_grad(self, set_to_none=False):
        """Zeroes all gradients, unless told otherwise."""
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("kind", [WithoutArguments, KeepsByDefault])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_own_zero_grad_gets_the_arguments_of_the_call(level, kind):
    model, optimizer = cases.prepared(level, lambda p: kind(p, lr=0.1))
    cases.train_step(model, optimizer, *cases.batch())
    optimizer.zero_grad()
    assert all(grad is not None and not grad.any() for grad in all_grads(model, optimizer))
    usual, expected = cases.prepared(level)
    for x, y in (cases.batch(), cases.batch(seed=2)):
        cases.train_step(usual, expected, x, y)
    cases.train_step(model, optimizer, *cases.batch(seed=2))
    assert cases.same(cases.masters(optimizer), cases.masters(expected))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_zero_grad_refuses_other_arguments_and_shows_its_own(level):
    _, optimizer = cases.prepared(level)
    assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
    with pytest.raises(TypeError, match="set_to_nil"):
        optimizer.zero_grad(set_to_nil=True)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_optimizers_own_zero_grad_decides(level, plain, set_to_none):
    own, usual = (
        cases.prepared(level, lambda p, c=c: c(p, lr=0.1)) for c in (EverySecond, torch.optim.SGD)
    )
    for index, (x, y) in enumerate(cases.batches(4)):
        for model, optimizer in (own, usual):
            if plain and level in ("O0", "O4", "O5"):
                cases.loss_of(model, x, y).backward()
            else:
                cases.backward(model, optimizer, x, y)
            optimizer.step()
        own[1].zero_grad(set_to_none)
        if index % 2:
            usual[1].zero_grad(set_to_none)
        assert cases.same(all_grads(*own), all_grads(*usual))
    assert cases.same(cases.masters(own[1]), cases.masters(usual[1]))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_gradients_from_before_a_failed_block_are_not_taken_for_cleared_ones(level):
    (model, optimizer), (only, stepped) = cases.prepared(level), cases.prepared(level)
    first, second = cases.batch(seed=1), cases.batch(seed=2)
    cases.backward(model, optimizer, *first)
    with pytest.raises(KeyError), amp.scale_loss(model(first[0]).sum(), optimizer):
        raise KeyError
    cases.backward(model, optimizer, *second)
    for x, y in (first, second):
        cases.backward(only, stepped, x, y)
    assert cases.same(
        [param.grad for param in amp.master_params(optimizer)],
        [param.grad for param in amp.master_params(stepped)],
    )


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_clearing_one_model_leaves_the_masters_of_another(level):
    models = [cases.net(1), cases.net(2)]
    optimizer = cases.sgd([*models[0].parameters(), *models[1].parameters()])
    amp.initialize(models, optimizer, opt_level=level, verbosity=0)
    x, y = cases.batch()
    loss = cases.loss_of(models[0], x, y) + cases.loss_of(models[1], x, y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    models[0].zero_grad()
    cleared = [param.grad is None for param in amp.master_params(optimizer)]
    assert cleared == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("level", "plain"),
    [("O1", False), ("O2", False), ("O4", False), ("O5", False), ("O4", True), ("O5", True)],
)
def test_gradients_cleared_by_hand_train_like_zero_grad(level, plain):
    usual, by_hand = (cases.prepared(level, cases.OPTIMIZERS["Adam"]) for _ in range(2))
    for x, y in cases.batches(3):
        cases.train_step(*usual, x, y)
        model, optimizer = by_hand
        for param in model.parameters():
            param.grad = None
        if plain:
            cases.loss_of(model, x, y).backward()
        else:
            cases.backward(model, optimizer, x, y)
        optimizer.step()
    assert cases.same(cases.masters(usual[1]), cases.masters(by_hand[1]))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_step_without_a_pass_never_takes_scaled_gradients_for_true_ones(level):
    model, optimizer = cases.prepared(level, loss_scale=2.0**10)
    cases.train_step(model, optimizer, *cases.batch())
    before = cases.masters(optimizer)
    optimizer.step()
    moved = [
        float((a - b).abs().max()) for a, b in zip(before, cases.masters(optimizer), strict=True)
    ]
    assert max(moved) < 1.0
