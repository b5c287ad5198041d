"""Parameter groups: added, frozen, unfrozen, scheduled; their dicts keep identity."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex._engine import block_step
from apex.optimizers import FusedAdam
from tests.support import training as cases


def initialized(level, model, optimizer):
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def train(model, optimizer, steps=2):
    for x, y in cases.batches(steps):
        cases.train_step(model, optimizer, x, y)


class OwnList(torch.optim.Optimizer):
    """Steps a list of parameters that it made at construction, as some optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.flat = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.flat:
            if param.grad is not None:
                param.add_(param.grad, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", ["tensor", "parameter of a frozen model"])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_optimizer_may_train_an_input_of_a_model(level, kind):
    """Style transfer, adversarial patches and inversions of GANs do."""
    model, image = cases.net(), torch.full((2, 4), 0.5, requires_grad=True)
    if kind != "tensor":
        model.requires_grad_(False)
        image = nn.Parameter(image.detach())
    optimizer = torch.optim.SGD([image], lr=0.1)
    expected = image.detach() - 0.1 * torch.autograd.grad(cases.net()(image).sum(), image)[0]
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    with amp.scale_loss(model(image).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert image.dtype is torch.float32
    torch.testing.assert_close(image.detach(), expected, atol=1e-3, rtol=0)
    assert not torch.equal(image.detach(), torch.full((2, 4), 0.5))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_optimizer_that_keeps_its_own_list_steps_what_its_groups_hold(level):
    model, optimizer = cases.prepared(level, OwnList)
    other = cases.prepared(level, lambda p: torch.optim.SGD(p, lr=0.1))
    train(model, optimizer)
    train(*other)
    assert cases.same(list(model.parameters()), list(other[0].parameters()))
    assert cases.same(cases.masters(optimizer), cases.masters(other[1]))
    assert all(a is b for a, b in zip(optimizer.flat, amp.master_params(optimizer), strict=True))
    amp.restore(model, optimizer)
    assert all(a is b for a, b in zip(optimizer.flat, model.parameters(), strict=True))


@pytest.mark.parametrize("after_backward", [False, True])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_group_added_later_trains_like_one_from_the_start(level, after_backward):
    together = cases.prepared(level, lambda p: torch.optim.Adam(p, lr=0.01))
    model = cases.net()
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01)
    initialized(level, model, optimizer)
    if after_backward:
        cases.backward(model, optimizer, *cases.batch(9))
        optimizer.zero_grad()
        model.zero_grad()
    # What is added are 16-bit parameters: their masters start from the rounded values.
    optimizer.add_param_group({"params": list(model[2].parameters())})
    with torch.no_grad():
        for param, master in zip(
            optimizer.param_groups[1]["params"], cases.net()[2].parameters(), strict=True
        ):
            param.copy_(master)
    train(model, optimizer)
    train(*together)
    assert cases.same(cases.masters(optimizer), cases.masters(together[1]))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_group_added_later_gets_fp32_masters(level):
    model = cases.net()
    exact = model[2].weight.detach().clone()
    optimizer = cases.sgd(model[0].parameters())
    initialized(level, model, optimizer)
    optimizer.add_param_group({"params": model[2].weight})
    (master,) = optimizer.param_groups[1]["params"]
    assert cases.same(master.detach(), exact)


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_plain_module_added_later_is_trained(level):
    model, optimizer = cases.prepared(level)
    head = nn.Linear(2, 2)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    before = cases.values(head.parameters())
    x, y = cases.batch()
    with amp.scale_loss((head(model(x).float()).float() - y).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not cases.same(before, cases.values(head.parameters()))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_parameter_that_is_already_stepped_is_refused(level):
    model, optimizer = cases.prepared(level)
    with pytest.raises(ValueError, match="parameter"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_group_that_is_no_dict_is_refused(level):
    model, optimizer = cases.prepared(level)
    with pytest.raises(TypeError, match=r"add_param_group got a list; it takes one dict"):
        optimizer.add_param_group([nn.Parameter(torch.ones(2))])
    assert len(optimizer.param_groups) == 1
    del model


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_named_parameter_that_is_already_stepped_is_refused(level):
    model = cases.net()
    optimizer = cases.sgd(model.named_parameters())
    initialized(level, model, optimizer)
    with pytest.raises(ValueError, match="parameter"):
        optimizer.add_param_group({"params": [("again", model[0].weight)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("level", cases.LEVELS)
def test_groups_that_are_built_anew_step_the_same_masters(level):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["Adam"])
    other, expected = cases.prepared(level, cases.OPTIMIZERS["Adam"])
    for each in (model, optimizer), (other, expected):
        train(*each)
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": model.parameters()})
    for each in (model, optimizer), (other, expected):
        train(*each)
    assert cases.same(cases.masters(optimizer), cases.masters(expected))

    del optimizer.param_groups[0]["params"][0]
    with pytest.raises(ValueError, match="parameter"):
        optimizer.add_param_group({"params": list(model.parameters())})
    optimizer.add_param_group({"params": [model[0].weight]})
    assert len(cases.masters(optimizer)) == len(cases.masters(expected))


@pytest.mark.parametrize("train_one", [cases.train_step, cases.train_step_with_closure])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_group_that_a_script_fills_with_the_models_parameters_steps_masters(level, train_one):
    (model, optimizer), expected = (
        cases.prepared(level, cases.OPTIMIZERS["Adam"]) for _ in range(2)
    )
    for x, y in cases.batches(3):
        train_one(model, optimizer, x, y)
        train_one(*expected, x, y)
        optimizer.param_groups[0]["params"] = list(model.parameters())
    train_one(model, optimizer, x, y)
    train_one(*expected, x, y)
    assert cases.same(cases.masters(optimizer), cases.masters(expected[1]))
    assert cases.same(list(model.parameters()), list(expected[0].parameters()))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_frozen_parameter_stays_as_it_is(level):
    model = cases.net()
    model[0].requires_grad_(False)
    optimizer = cases.OPTIMIZERS["Adam"](model.parameters())
    initialized(level, model, optimizer)
    before = cases.values(model[0].parameters())
    train(model, optimizer)
    assert cases.same(before, cases.values(model[0].parameters()))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_frozen_parameter_gets_its_master_when_it_is_unfrozen(level):
    model = cases.net()
    model[0].requires_grad_(False)
    optimizer = cases.sgd(model.parameters())
    initialized(level, model, optimizer)
    train(model, optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model[0].requires_grad_(True)
    train(model, optimizer)
    assert optimizer.param_groups[0]["params"][0].dtype is torch.float32


@pytest.mark.filterwarnings("ignore:optimizer.step")  # gradients of a plain backward at O2
@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_frozen_parameter_with_a_gradient_is_stepped_as_torch_does(level):
    def trained(start):
        model = cases.net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for x, y in cases.batches(1):
            cases.loss_of(model, x, y).backward()
        optimizer.step()
        model[0].requires_grad_(False)
        start(model, optimizer)
        optimizer.step()
        return [param.float() for param in optimizer.param_groups[0]["params"]]

    plain = trained(lambda model, optimizer: None)
    for own, wanted in zip(trained(lambda *both: initialized(level, *both)), plain, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("level", cases.LEVELS)
def test_an_unfrozen_parameter_trains(level):
    model = cases.net()
    model[0].requires_grad_(False)
    optimizer = cases.OPTIMIZERS["Adam"](model.parameters())
    initialized(level, model, optimizer)
    train(model, optimizer)
    before = cases.values(model[0].parameters())
    model[0].requires_grad_(True)
    train(model, optimizer)
    assert not cases.same(before, cases.values(model[0].parameters()))


@pytest.mark.parametrize("level", cases.MIXED)
def test_a_parameter_frozen_in_training_stops_there_and_goes_on_when_unfrozen(level):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["Adam"])
    train(model, optimizer)
    model[0].requires_grad_(False)
    before = cases.values(model[0].parameters())
    train(model, optimizer)
    assert cases.same(before, cases.values(model[0].parameters()))
    model[0].requires_grad_(True)
    train(model, optimizer)
    assert not cases.same(before, cases.values(model[0].parameters()))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_parameter_without_gradient_stays_as_it_is(level):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["fused AdamW"])
    unused = nn.Linear(4, 8)
    optimizer.add_param_group({"params": unused.parameters()})
    before = cases.values(unused.parameters())
    train(model, optimizer)
    assert cases.same(before, cases.values(unused.parameters()))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_scheduler_sets_the_rate_of_the_groups_that_are_stepped(level):
    def moved_by(rate_factor):
        model, optimizer = cases.prepared(level)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: rate_factor)
        before = cases.masters(optimizer)
        train(model, optimizer, 1)
        scheduler.step()
        return cases.same(before, cases.masters(optimizer))

    assert moved_by(0.0)
    assert not moved_by(1.0)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_masters_hold_the_fp32_values_from_before_rounding(level):
    exact = cases.values(cases.net().parameters())
    _, optimizer = cases.prepared(level)
    assert cases.same(exact, cases.masters(optimizer))


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_fp32_batch_norm_parameters_are_their_own_masters(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = cases.sgd(model.parameters())
    initialized(level, model, optimizer)
    stepped = optimizer.param_groups[0]["params"]
    assert stepped[2] is model[1].weight
    assert stepped[3] is model[1].bias


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_batch_norm_trains_beside_masters_like_by_hand(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    weights = cases.values(model.parameters())
    optimizer = cases.sgd(model.parameters())
    initialized(level, model, optimizer)
    x, _ = cases.batch()
    with amp.scale_loss(model(x).square().mean() + model[1].weight.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    low = cases.LEVELS[level].stored
    w, b = (value.to(low).requires_grad_() for value in weights[:2])
    gamma, beta = (value.clone().requires_grad_() for value in weights[2:])
    out = nn.functional.batch_norm(
        nn.functional.linear(x.to(low), w, b), None, None, gamma, beta, training=True
    )
    scale = cases.loss_scale()
    ((out.float().square().mean() + gamma.sum()) * scale).backward()
    expected = [
        value.add(param.grad.float() / scale, alpha=-0.1)
        for value, param in zip(weights, (w, b, gamma, beta), strict=True)
    ]
    assert cases.same(expected, cases.masters(optimizer))


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called before any backward pass")
@pytest.mark.parametrize("level", cases.MIXED)
def test_a_step_before_any_scale_loss_changes_nothing(level):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["fused AdamW"])
    before = cases.values(model.parameters()), cases.masters(optimizer)
    optimizer.step()
    assert cases.same(before, (cases.values(model.parameters()), cases.masters(optimizer)))


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_plain_backward_without_scale_loss_trains_the_same(level):
    plain, scaled = (cases.prepared(level, cases.OPTIMIZERS["Adam"]) for _ in range(2))
    for x, y in cases.batches(3):
        model, optimizer = plain
        optimizer.zero_grad()
        cases.loss_of(model, x, y).backward()
        optimizer.step()
        cases.train_step(*scaled, x, y)
    assert cases.same(cases.masters(plain[1]), cases.masters(scaled[1]))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_group_without_params_is_refused_as_torch_refuses_it(level):
    _, optimizer = cases.prepared(level)
    group = {"param": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1}
    with pytest.raises(KeyError, match="without params; its keys are: param, lr"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert list(group) == ["param", "lr"]


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_module_added_to_a_deep_copy_is_cast(level):
    original = cases.prepared(level)
    ends = []
    for model, optimizer in (original, copy.deepcopy(original)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model.append(nn.Linear(2, 2))
        optimizer.add_param_group({"params": model[3].parameters()})
        train(model, optimizer)
        ends.append((cases.masters(optimizer), cases.values(model.parameters())))
    assert cases.same(*ends)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("scale", [8.0, "dynamic"])
@pytest.mark.parametrize("make_optimizer", [cases.OPTIMIZERS["fused AdamW"], FusedAdam])
@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_group_is_filled_before_an_iteration(monkeypatch, level, make_optimizer, scale, clips):
    monkeypatch.setattr(block_step, "least_elements", 1)  # gradients wait in 16 bits
    ends = []
    for fills in (False, True):
        model, optimizer = cases.prepared(level, make_optimizer, loss_scale=scale)
        cases.train_step(model, optimizer, *cases.batch())
        if fills:
            optimizer.param_groups[0]["params"] = list(model.parameters())
        optimizer.zero_grad()
        for x, y in cases.batches(2, seed=3):
            cases.backward(model, optimizer, x, y)
        if clips:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        ends.append(cases.masters(optimizer))
    assert cases.same(*ends)


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_the_state_is_saved_and_loaded_after_a_group_was_filled(level):
    ends = []
    for fills in (False, True):
        model, optimizer = cases.prepared(level, cases.OPTIMIZERS["Adam"])
        train(model, optimizer)
        if fills:
            optimizer.param_groups[0]["params"] = list(model.parameters())
        saved = copy.deepcopy(optimizer.state_dict())
        if fills:
            optimizer.param_groups[0]["params"] = list(model.parameters())
        optimizer.load_state_dict(saved)
        train(model, optimizer)
        ends.append((saved["state"], cases.masters(optimizer)))
    assert cases.same(*ends)
