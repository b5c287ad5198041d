"""What passes and plain code leave in gradients and flags, beside plain torch."""

import pytest
import torch
from torch import nn

from apex import amp
from apex._engine.optimizer import one_pass
from tests.training import cases

SCALED = ("O1", "O2")


def identity_levels(level):
    return {"loss_scale": 1.0} if level == "O2" else {}


def shadow(model, optimizer):
    """A plain 16-bit model with the masters' rounded values, and zeroed fp32 sums of gradients."""
    low = next(model.parameters()).dtype
    plain = cases.net()
    for param, master in zip(plain.parameters(), amp.master_params(optimizer), strict=True):
        param.data.copy_(master)
    return plain.to(low)


def add_up(sums, model, x, y, scale=1.0):
    """Adds the gradients of one batch, in fp32, to ``sums``."""
    low = next(model.parameters()).dtype
    model.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x.to(low)).float(), y)
    (loss * scale).backward()
    for total, param in zip(sums, model.parameters(), strict=True):
        total.add_(param.grad.float() / scale)


# -- without zero_grad -----------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_gradients_add_up_over_steps_without_zero_grad(level, scale):
    model, optimizer = cases.prepared(level, loss_scale=scale)
    sums = [torch.zeros_like(master) for master in amp.master_params(optimizer)]
    for x, y in cases.batches(3):
        add_up(sums, shadow(model, optimizer), x, y, scale)
        cases.backward(model, optimizer, x, y)
        assert cases.same(cases.grads(amp.master_params(optimizer)), sums)
        optimizer.step()


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_plain_backward_passes_add_up_without_zero_grad(level):
    model, optimizer = cases.prepared(level)
    for x, y in cases.batches(2):
        cases.loss_of(model, x, y).backward()
        optimizer.step()
    first, second = cases.batches(2)
    plain, own = cases.prepared(level)
    cases.loss_of(plain, *first).backward()
    own.step()
    kept = [param.grad.clone() for param in plain.parameters()]
    plain.zero_grad()
    cases.loss_of(plain, *second).backward()
    for param, grad in zip(plain.parameters(), kept, strict=True):
        param.grad += grad
    own.step()
    for one, other in zip(amp.master_params(optimizer), amp.master_params(own), strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_master_params_have_the_gradients_of_a_plain_backward(level):
    model, optimizer = cases.prepared(level)
    cases.loss_of(model, *cases.batch()).backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    norm = torch.nn.utils.get_total_norm(p.grad for p in amp.master_params(optimizer))
    torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_gradients_cleared_by_hand_are_gone(level):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    cases.backward(model, optimizer, *cases.batch(1))
    for param in model.parameters():
        param.grad = None
    cases.backward(model, optimizer, *cases.batch(2))
    other, own = cases.prepared(level, loss_scale=128.0)
    cases.backward(other, own, *cases.batch(2))
    assert cases.same(
        cases.grads(amp.master_params(optimizer)), cases.grads(amp.master_params(own))
    )


@pytest.mark.parametrize("owner", ["optimizer", "model"])
@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_gradients_cleared_by_hand_are_gone_also_when_what_is_left_is_zeroed(level, owner):
    model, optimizer = cases.prepared(level, loss_scale=128.0)
    cases.backward(model, optimizer, *cases.batch(1))
    for param in model.parameters():
        param.grad = None
    (optimizer if owner == "optimizer" else model).zero_grad(set_to_none=False)
    assert all(master.grad is None for master in amp.master_params(optimizer))


@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
@pytest.mark.parametrize("level", cases.MIXED)
def test_gradients_zeroed_through_a_wrapper_are_gone(level, scale):
    model, optimizer = cases.prepared(level, loss_scale=scale)
    for seed in (1, 2):
        cases.backward(model, optimizer, *(0.01 * value for value in cases.batch(seed)))
    optimizer.step()
    Around(model).zero_grad(set_to_none=False)
    cases.backward(model, optimizer, *(0.01 * value for value in cases.batch(3)))
    other, own = cases.prepared(level, loss_scale=scale)
    other.load_state_dict(model.state_dict())
    cases.backward(other, own, *(0.01 * value for value in cases.batch(3)))
    assert cases.same(
        cases.grads(amp.master_params(optimizer)), cases.grads(amp.master_params(own))
    )


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_clipping_the_models_gradients_at_scale_one_clips_the_masters(level):
    model, optimizer = cases.prepared(level, loss_scale=1.0)
    for seed in (1, 2):
        cases.backward(model, optimizer, *cases.batch(seed))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    norm = torch.nn.utils.get_total_norm(p.grad for p in amp.master_params(optimizer))
    torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=0.01, atol=0.0)


# -- passes that reach none of the 16-bit parameters ------------------------------------------


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))

    def penalty(self):
        return (self.norm.weight - 2).square().sum()


def loss_and_penalty(level, order):
    model, optimizer = cases.prepared(level, model=WithNorm(), loss_scale=128.0)
    for part in order:
        x, y = cases.batch(1)
        loss = cases.loss_of(model, x, y) if part == "loss" else model.penalty()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    return cases.grads(amp.master_params(optimizer))


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_pass_over_fp32_parameters_keeps_earlier_gradients(level):
    torch.manual_seed(0)
    first = loss_and_penalty(level, ["loss", "penalty"])
    torch.manual_seed(0)
    second = loss_and_penalty(level, ["penalty", "loss"])
    torch.manual_seed(0)
    third = loss_and_penalty(level, ["loss", "penalty", "penalty", "loss"])
    assert cases.same(first, second)
    torch.testing.assert_close(third, [2 * grad for grad in first])


@pytest.mark.parametrize("level", SCALED)
def test_an_overflow_skips_the_step_whatever_pass_follows(level):
    torch.manual_seed(0)
    model, optimizer = cases.prepared(level, model=WithNorm())
    before = cases.masters(optimizer)
    cases.backward(model, optimizer, *cases.overflowing())
    with amp.scale_loss(model.penalty(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert cases.same(cases.masters(optimizer), before)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_loss_for_the_other_network_loses_nothing(level):
    nets = [cases.net(0), cases.net(1)]
    optimizers = [cases.sgd(net.parameters()) for net in nets]
    nets, optimizers = amp.initialize(
        nets, optimizers, opt_level=level, loss_scale=128.0, verbosity=0
    )
    cases.backward(nets[0], optimizers, *cases.batch(1))
    expected = cases.grads(amp.master_params(optimizers[0]))
    cases.backward(nets[1], optimizers, *cases.batch(2))
    assert cases.same(cases.grads(amp.master_params(optimizers[0])), expected)
    before = cases.masters(optimizers[0])
    optimizers[0].step()
    assert not cases.same(cases.masters(optimizers[0]), before)


# -- overflows that are thrown away -----------------------------------------------------------


class Around(nn.Module):
    """A module around the model, as wrappers are; its zero_grad is torch's own."""

    def __init__(self, module):
        super().__init__()
        self.module = module


CLEARS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "wrapper": lambda model, optimizer: Around(model).zero_grad(),
    "wrapper, to zero": lambda model, optimizer: Around(model).zero_grad(set_to_none=False),
    "by hand, to zero": lambda model, optimizer: [p.grad.zero_() for p in model.parameters()],
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "by hand, by zeros": lambda model, optimizer: [
        setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()
    ],
    "masters by hand, by zeros": lambda model, optimizer: [
        setattr(p, "grad", torch.zeros_like(p)) for p in amp.master_params(optimizer)
    ],
    "masters by hand, to zero": lambda model, optimizer: [
        p.grad.zero_() for p in amp.master_params(optimizer)
    ],
    "through data": lambda model, optimizer: [p.grad.data.zero_() for p in model.parameters()],
    "masters through data": lambda model, optimizer: [
        p.grad.data.zero_() for p in amp.master_params(optimizer)
    ],
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("least_elements", [one_pass.least_elements, 1])
def test_clearing_after_an_overflow_lets_the_next_clean_step_through(
    level, optimizer, clear, stepped, least_elements, monkeypatch
):
    monkeypatch.setattr(one_pass, "least_elements", least_elements)
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS[optimizer], loss_scale="dynamic")
    cases.backward(model, optimizer, *cases.overflowing())
    if stepped:
        optimizer.step()
    CLEARS[clear](model, optimizer)
    before = cases.masters(optimizer)
    cases.backward(model, optimizer, *(0.01 * value for value in cases.batch()))
    optimizer.step()
    after = cases.masters(optimizer)
    assert not cases.same(after, before)
    assert all(value.isfinite().all() for value in after)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_poisoned_gradients_that_stay_are_never_stepped(level):
    model, optimizer = cases.prepared(level, loss_scale="dynamic")
    cases.backward(model, optimizer, *cases.overflowing())
    before = cases.masters(optimizer)
    optimizer.step()
    cases.backward(model, optimizer, *(0.01 * value for value in cases.batch()))
    optimizer.step()
    assert cases.same(cases.masters(optimizer), before)


# -- closures ---------------------------------------------------------------------------------


class Swallowing(torch.optim.SGD):
    """Steps on, whatever its closure raises."""

    caught = Exception

    def step(self, closure):
        try:
            loss = torch.enable_grad()(closure)()
        except self.caught:
            loss = None
        super().step()
        return loss


class SwallowingAll(Swallowing):
    caught = BaseException


@pytest.mark.parametrize("kind", [Swallowing, SwallowingAll])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_catches_exceptions_cannot_step_on_an_overflow(level, kind):
    model, optimizer = cases.prepared(level, lambda params: kind(params, lr=0.1))
    before = cases.masters(optimizer)
    cases.train_step_with_closure(model, optimizer, *cases.overflowing())
    assert cases.same(cases.masters(optimizer), before)


@pytest.mark.parametrize(("level", "copies"), [("O0", 0), ("O4", 0), ("O5", 0), ("O1", 1)])
def test_a_step_with_a_closure_copies_state_only_where_it_may_be_skipped(
    level, copies, monkeypatch
):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["Adam"])
    small = [0.01 * value for value in cases.batch()]
    cases.train_step_with_closure(model, optimizer, *small)
    copied = []

    class Counted(dict):
        def __deepcopy__(self, memo):
            copied.append(self)
            return Counted(self)

    first = next(iter(optimizer.state))
    optimizer.state[first] = Counted(optimizer.state[first])
    cases.train_step_with_closure(model, optimizer, *small)
    assert len(copied) == copies


# -- optimizers that share a parameter -------------------------------------------------------


def sharing(level):
    model = cases.net()
    optimizers = [cases.sgd(model.parameters()), cases.sgd(model[2].parameters())]
    return amp.initialize(model, optimizers, opt_level=level, verbosity=0, loss_scale="dynamic")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_an_overflow_skips_every_optimizer_of_the_poisoned_parameter(level):
    model, (one, two) = sharing(level)
    before = cases.masters(one)
    with amp.scale_loss(model[2].weight.float().sum() * torch.inf, two) as scaled_loss:
        scaled_loss.backward()
    one.step()
    two.step()
    assert cases.same(cases.masters(one), before)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_failed_pass_of_several_optimizers_leaves_shared_gradients(level):
    model, optimizers = sharing(level)
    cases.backward(model, optimizers, *cases.batch())
    before = cases.grads(amp.master_params(optimizers[0]))
    with pytest.raises(ZeroDivisionError), amp.scale_loss(torch.ones(()), optimizers):
        raise ZeroDivisionError
    assert cases.same(cases.grads(amp.master_params(optimizers[0])), before)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_pass_that_reaches_nothing_leaves_an_overflow_of_shared_gradients_pending(level):
    model, optimizers = sharing(level)
    before = cases.masters(optimizers[0])
    for loss in (model[2].weight.float().sum() * torch.inf, torch.ones(1, requires_grad=True)):
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.sum().backward()
    for optimizer in reversed(optimizers):
        optimizer.step()
    assert cases.same(cases.masters(optimizers[0]), before)
