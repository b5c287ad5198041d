"""What an optimizer's groups hold, and how they may change."""

from collections import UserList

import pytest
import torch
from torch import nn

from apex import amp, optimizers
from tests.support import loops
from tests.support.features import adagrad_takes_groups


def test_groups_keep_their_identity_and_options(level):
    model = loops.net()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    own, inside = optimizer.param_groups, list(optimizer.param_groups)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert optimizer.param_groups is own
    assert all(a is b for a, b in zip(own, inside, strict=True))
    assert [group["lr"] for group in own] == [0.5, 0.1]


@pytest.mark.parametrize("kind", ["tensor", "parameter of a frozen model", "second optimizer"])
def test_an_optimizer_may_train_an_input_of_a_model(level, kind):
    """Style transfer, adversarial patches, inversions of GANs and center losses do."""
    model, image = loops.net(), torch.full((2, 4), 0.5, requires_grad=True)
    optimizers = [loops.sgd(model.parameters())] if kind == "second optimizer" else []
    if kind != "tensor":
        model.requires_grad_(kind == "second optimizer")
        image = nn.Parameter(image.detach())
    optimizer = torch.optim.SGD([image], lr=0.1)
    expected = image.detach() - 0.1 * torch.autograd.grad(loops.net()(image).sum(), image)[0]
    amp.initialize(model, [*optimizers, optimizer], opt_level=level, loss_scale=128.0, verbosity=0)
    loops.scaled_backward(model(image).float().sum(), [*optimizers, optimizer])
    optimizer.step()
    torch.testing.assert_close(image.detach(), expected, atol=1e-3, rtol=0)
    assert not torch.equal(image.detach(), torch.full((2, 4), 0.5))


# -- groups change ---------------------------------------------------------------------------


BAD_GROUPS = {
    "stepped": (lambda w: {"params": [w]}, ValueError, "parameter"),
    "no dict": (lambda w: [w], TypeError, "must be a dict"),
    "no params": (lambda w: {"param": [w], "lr": 1}, KeyError, "params"),
}


@pytest.mark.parametrize(("make", "error", "words"), BAD_GROUPS.values(), ids=BAD_GROUPS)
def test_a_bad_group_is_refused_and_nothing_changes(level, make, error, words):
    model, optimizer = loops.prepared(level)
    with pytest.raises(error, match=words):
        optimizer.add_param_group(make(model[0].weight))
    assert len(optimizer.param_groups) == 1


@loops.every(joins=["group", "unfrozen"], name=["Adagrad", "SGD"])
def test_weights_that_join_later_are_trained_by_fused_optimizers_as_by_torch_s(level, joins, name):
    if (joins, name) == ("group", "Adagrad") and not adagrad_takes_groups:
        pytest.skip("Adagrad of this torch makes no state for a later group")
    ends = []
    for make in (getattr(torch.optim, name), getattr(optimizers, f"Fused{name}")):
        model = loops.net()
        model[2].requires_grad_(False).bfloat16().float()  # exact without a master
        first = model[0] if joins == "group" else model
        optimizer = make(first.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        loops.train(model, optimizer, 2)
        model[2].requires_grad_(True)
        if joins == "group":
            optimizer.add_param_group({"params": model[2].parameters()})
        loops.train(model, optimizer, 2)
        ends.append(loops.masters(optimizer))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [loops.train_step, loops.train_step_with_closure])
def test_a_group_that_a_script_fills_with_the_models_parameters_steps_masters(level, step):
    ends = []
    for fills in (False, True):
        model, optimizer = loops.prepared(level, loops.OPTIMIZERS["Adam"], loss_scale=64.0)
        for x, y in loops.batches(3):
            step(model, optimizer, x, y)
            if fills:
                optimizer.param_groups[0]["params"] = list(model.parameters())
        step(model, optimizer, x, y)
        ends.append((loops.masters(optimizer), loops.values(model.parameters())))
    assert loops.same(*ends)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_weight_that_moves_to_another_optimizer_is_trained_by_it(level, set_to_none):
    model = loops.net()
    optimizers = [loops.fused_adamw_of(part.parameters()) for part in (model[0], model[2])]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=64.0, verbosity=0)
    first, second = optimizers
    moved = first.param_groups[0]["params"].pop(0)
    second.add_param_group({"params": [moved]})
    loops.backward(model, optimizers, *loops.batch())
    grad = moved.grad.clone()
    first.zero_grad(set_to_none=set_to_none)
    assert torch.equal(moved.grad, grad)
    loops.backward(model, optimizers, *loops.batch())
    assert torch.equal(moved.grad, 2.0 * grad)
    before = moved.detach().clone()
    second.step()
    assert not torch.equal(moved, before)
    assert torch.equal(model[0].weight, moved.to(model[0].weight.dtype))
    second.zero_grad(set_to_none=set_to_none)
    assert moved.grad is None or not moved.grad.any()


# -- frozen weights --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:optimizer.step.. got gradients that no amp.scale_loss")
@pytest.mark.parametrize("step", [loops.train_step, loops.plain_step])
def test_a_frozen_parameter_stays_and_gets_its_master_when_it_is_unfrozen(level, step):
    model = loops.net()
    model[0].requires_grad_(False)
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS["Adam"], model)
    before = loops.values(model[0].parameters())
    step(model, optimizer, *loops.batch())
    assert loops.same(before, loops.values(model[0].parameters()))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model[0].requires_grad_(True)
    step(model, optimizer, *loops.batch())
    assert not loops.same(before, loops.values(model[0].parameters()))
    master = optimizer.param_groups[0]["params"][0]
    assert master.dtype is torch.float32
    master.data.add_(1.0)
    model(loops.batch()[0])
    assert loops.agree(model, optimizer)


def test_a_gradient_of_an_unfrozen_weight_that_fp16_does_not_hold_is_kept():
    model = loops.Weights()
    model.a.requires_grad_(False)
    model, optimizer = loops.prepared("O2", model=model, loss_scale=2.0**16)
    model.a.requires_grad_(True)
    small = 2.0**-26
    loops.scaled_backward(model(a=small, b=1.0), optimizer)
    assert model.a.grad.tolist() == [small, small]


def test_a_late_module_leaves_the_fp32_values_of_frozen_ones(level):
    model = loops.net()
    exact = loops.values(model[0].requires_grad_(False).parameters())
    optimizer = loops.sgd(model[2].parameters())
    options = {"opt_level": level, "keep_fp32_values": True, "verbosity": 0}
    amp.initialize(model, optimizer, **options)
    model[0].requires_grad_(True)
    model.append(nn.Linear(2, 2))
    for part in (model[3], model[0]):
        optimizer.add_param_group({"params": part.parameters()})
    assert loops.same(exact, loops.values(optimizer.param_groups[2]["params"]))


def by_attribute(params, trains):
    for param in params:
        param.requires_grad = trains


def by_method(params, trains):
    assert all(param.requires_grad_(trains) is param for param in params)


@pytest.mark.parametrize("freeze", [by_attribute, by_method])
def test_a_group_is_frozen_through_its_optimizer(level, freeze):
    """As Lightning's ``toggle_optimizer`` does: no pass of another optimizer adds to it."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 2)
    parts = loops.sgd(first.parameters()), loops.sgd(last.parameters())
    model, (optimizer, other) = amp.initialize(
        nn.Sequential(first, last), [*parts], opt_level=level, loss_scale=64.0, verbosity=0
    )
    frozen = optimizer.param_groups[0]["params"]
    before = loops.masters(optimizer)
    freeze(frozen, False)
    assert not any(param.requires_grad for param in [*frozen, *first.parameters()])
    loops.train_step(model, other, *loops.batch())
    assert all(param.grad is None for param in frozen)
    assert loops.same(before, loops.masters(optimizer))
    freeze(frozen, True)
    loops.train_step(model, optimizer, *loops.batch())
    assert not loops.same(before, loops.masters(optimizer))
    first.requires_grad_(False)
    assert not any(param.requires_grad for param in frozen)


def test_a_frozen_parameter_with_a_gradient_is_stepped_as_torch_does(level):
    def trained(prepares):
        model, optimizer = loops.plain_pair(lambda p: torch.optim.AdamW(p, fused=True))
        loops.loss_of(model, *loops.batch()).backward()
        optimizer.step()
        model[0].requires_grad_(False)
        if prepares:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        optimizer.step()
        return [param.float() for param in optimizer.param_groups[0]["params"]]

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called before any backward pass")
@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
def test_what_has_no_gradient_stays_as_it_is(level, name):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS[name])
    before = loops.values(model.parameters()), loops.masters(optimizer)
    optimizer.step()
    assert loops.same(before, (loops.values(model.parameters()), loops.masters(optimizer)))
    unused = nn.Linear(4, 8)
    optimizer.add_param_group({"params": unused.parameters()})
    before = loops.values(unused.parameters())
    loops.train(model, optimizer, 2)
    assert loops.same(before, loops.values(unused.parameters()))


class ManyKinds(torch.optim.SGD):
    """Holds its parameters in a container of its own choice."""

    def __init__(self, params, kind):
        super().__init__(params, lr=0.1)
        (group,) = self.param_groups
        group["params"] = kind(group["params"])


class Tagged(torch.Tensor):
    """A class of tensors, such as a script's own."""


@loops.every(level=loops.WITH_MASTERS, kind=[frozenset, UserList, nn.ParameterList])
def test_a_container_that_cannot_take_masters_is_refused_and_nothing_changes(level, kind):
    model = loops.net()
    optimizer = ManyKinds(model.parameters(), kind)
    with loops.nothing_changes(model, optimizer), pytest.raises(TypeError, match="Use a list, or"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    loops.train(*loops.prepared("O4", lambda params: ManyKinds(params, kind)))


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_a_parameter_that_cannot_have_a_master_is_refused_and_nothing_changes(level):
    model = loops.net()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Tagged))
    optimizer = loops.sgd(model.parameters())
    words = "Tagged, which cannot have an fp32 master. Use opt_level='O4'"
    with loops.nothing_changes(model, optimizer), pytest.raises(TypeError, match=words):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
