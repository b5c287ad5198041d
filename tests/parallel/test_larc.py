"""LARC scales gradients by the trust ratio, alone and around a prepared optimizer."""

import copy

import pytest
import torch

from apex import amp
from apex.parallel import LARC
from tests.training import cases

OPTIONS = [{}, {"clip": False}, {"trust_coefficient": 0.5, "eps": 1e-3}]


def sgd(params, weight_decay=0.1):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=weight_decay)


def scaled_by_hand(param, grad, *, lr, decay, trust_coefficient=0.02, clip=True, eps=1e-8):
    """The gradient that LARC's paper asks for, with the zero-norm rule of the original."""
    param_norm, grad_norm = param.norm(), grad.norm()
    if param_norm == 0 or grad_norm == 0:
        return grad.clone()
    rate = trust_coefficient * param_norm / (grad_norm + decay * param_norm + eps)
    if clip:
        rate = (rate / lr).clamp(max=1.0)
    return (grad + decay * param) * rate


def step_by_hand(params, momentum, lr=0.1, decay=0.1, **options):
    for param in params:
        if param.grad is None:
            continue
        grad = scaled_by_hand(param.detach(), param.grad.float(), lr=lr, decay=decay, **options)
        momentum[param] = 0.9 * momentum[param] + grad if param in momentum else grad
        param.data.add_(momentum[param], alpha=-lr)


def assert_close(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-20, atol=2**-24)


@pytest.mark.parametrize("options", OPTIONS)
def test_larc_around_plain_sgd_steps_by_the_trust_ratio(options):
    model, by_hand = cases.net(), cases.net()
    optimizer, momentum = LARC(sgd(model.parameters()), **options), {}
    for x, y in cases.batches(3):
        for own in (model, by_hand):
            own.zero_grad()
            cases.loss_of(own, x, y).backward()
        optimizer.step()
        step_by_hand(by_hand.parameters(), momentum, **options)
    assert_close(model.parameters(), by_hand.parameters())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_larc_at_a_level_steps_the_masters_by_the_trust_ratio(level, options):
    model = cases.net()
    optimizer = LARC(sgd(model.parameters()), **options)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    twin, momentum = [torch.nn.Parameter(value) for value in cases.masters(optimizer)], {}
    for x, y in cases.batches(3):
        optimizer.zero_grad()
        cases.backward(model, optimizer, x, y)
        for param, stepped in zip(twin, amp.master_params(optimizer), strict=True):
            param.grad = stepped.grad.clone()
        optimizer.step()
        step_by_hand(twin, momentum, **options)
        assert_close(cases.masters(optimizer), [param.detach() for param in twin])


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_larc_after_a_plain_backward_steps_like_after_scale_loss(level):
    def trained(plain):
        model = cases.net()
        optimizer = LARC(sgd(model.parameters()))
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if plain:
            cases.loss_of(model, *cases.batch()).backward()
        else:
            cases.backward(model, optimizer, *cases.batch())
        optimizer.step()
        return cases.masters(optimizer)

    assert cases.same(trained(plain=True), trained(plain=False))


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_larc_stepped_inside_the_block_or_by_closure_steps_like_after_it(level, closure):
    def trained(usual):
        model = cases.net()
        optimizer = LARC(sgd(model.parameters()))
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if usual:
            cases.train_step(model, optimizer, *cases.batch())
        elif closure:
            cases.train_step_with_closure(model, optimizer, *cases.batch())
        else:
            loss = cases.loss_of(model, *cases.batch())
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                optimizer.step()
        return cases.masters(optimizer)

    assert cases.same(trained(usual=True), trained(usual=False))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_skips_on_overflow(level):
    model = cases.net()
    optimizer = LARC(sgd(model.parameters()))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = cases.masters(optimizer)
    cases.train_step(model, optimizer, *cases.overflowing())
    assert cases.same(before, cases.masters(optimizer))


@pytest.mark.parametrize("zeroed", ["param", "grad"])
def test_a_zero_norm_leaves_the_gradient_as_it_is(zeroed):
    param = torch.nn.Parameter(torch.zeros(3) if zeroed == "param" else torch.ones(3))
    optimizer = LARC(torch.optim.SGD([param], lr=0.5, weight_decay=0.1))
    before = param.detach().clone()
    param.grad = torch.zeros(3) if zeroed == "grad" else torch.ones(3)
    expected = before - 0.5 * param.grad
    optimizer.step()
    assert torch.equal(param.detach(), expected)


def test_weight_decay_of_the_groups_is_back_after_the_step():
    model = cases.net()
    optimizer = LARC(sgd(model.parameters(), weight_decay=0.25))
    cases.loss_of(model, *cases.batch()).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_weight_decay_of_the_groups_is_back_after_a_closure_that_raises():
    optimizer = LARC(sgd(cases.net().parameters(), weight_decay=0.25))

    def closure():
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_larc_shows_the_optimizers_own_groups_state_and_attributes():
    inner = sgd(cases.net().parameters())
    optimizer = LARC(inner)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer) == repr(inner)


def test_larc_adds_groups_and_clears_gradients_of_the_optimizer():
    model = cases.net()
    optimizer = LARC(sgd(model[0].parameters()))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    cases.loss_of(model, *cases.batch()).backward()
    optimizer.zero_grad()
    assert len(optimizer.param_groups) == 2
    assert all(param.grad is None for param in model.parameters())


def test_larc_state_dict_round_trip_continues_bit_exactly():
    model, other = cases.net(), cases.net()
    optimizer, resumed = LARC(sgd(model.parameters())), LARC(sgd(other.parameters()))
    for x, y in cases.batches(2):
        model.zero_grad()
        cases.loss_of(model, x, y).backward()
        optimizer.step()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, own_optimizer in ((model, optimizer), (other, resumed)):
        own.zero_grad()
        cases.loss_of(own, *cases.batch(2)).backward()
        own_optimizer.step()
    assert cases.same(list(model.parameters()), list(other.parameters()))


def test_larc_refuses_anything_but_an_optimizer():
    with pytest.raises(TypeError, match=r"LARC got Linear; it wraps a torch\.optim\.Optimizer"):
        LARC(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["trust_coefficient", "eps"])
@pytest.mark.parametrize(
    ("error", "value"),
    [(ValueError, -1.0), (ValueError, float("nan")), (TypeError, "0.02"), (TypeError, None)],
)
def test_larc_refuses_factors_that_would_step_uphill_or_fail_later(name, error, value):
    with pytest.raises(error, match=f"{name} is {value!r}; it must be"):
        LARC(sgd(cases.net().parameters()), **{name: value})


def test_larc_reads_the_string_false_as_no_clipping():
    assert not LARC(sgd(cases.net().parameters()), clip="False").clip
    with pytest.raises(TypeError, match="clip is 'no'; it must be a bool"):
        LARC(sgd(cases.net().parameters()), clip="no")


def test_larc_refuses_sparse_gradients_and_changes_none():
    model = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = LARC(sgd(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    before, weight_decay = model.weight.grad, optimizer.param_groups[0]["weight_decay"]
    with pytest.raises(TypeError, match=r"LARC got a sparse gradient.*sparse=False"):
        optimizer.step()
    assert model.weight.grad is before
    assert optimizer.param_groups[0]["weight_decay"] == weight_decay


def test_a_learning_rate_scheduler_takes_the_optimizer_inside():
    optimizer = LARC(sgd(cases.net().parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optim, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_master_params_of_larc_have_the_gradients_of_a_plain_backward_pass(level):
    model, optimizer = cases.prepared(level, lambda p: LARC(sgd(p)), loss_scale=1.0)
    cases.loss_of(model, *cases.batch()).backward()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    assert norm > 1e-3
    grads = cases.grads(amp.master_params(optimizer))
    torch.testing.assert_close(torch.nn.utils.get_total_norm(grads), torch.tensor(1e-3))
    model[0].weight.grad = None
    assert next(amp.master_params(optimizer)).grad is None
