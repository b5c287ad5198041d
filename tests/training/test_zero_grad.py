"""Clearing gradients: of the optimizer or the model, to None or to zero."""

import pytest
from torch import nn

from apex import amp
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
