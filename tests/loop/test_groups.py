"""What an optimizer's groups hold, and how they may change."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as t

levels = pytest.mark.parametrize("level", t.LEVELS_SHORT)
masters = pytest.mark.parametrize("level", t.WITH_MASTERS)


def train(model, optimizer, steps=2):
    for x, y in t.batches(steps):
        t.train_step(model, optimizer, x, y)


@levels
def test_groups_keep_their_identity_and_options(level):
    model = t.net()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    own, inside = optimizer.param_groups, list(optimizer.param_groups)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert optimizer.param_groups is own
    assert all(a is b for a, b in zip(own, inside, strict=True))
    assert [group["lr"] for group in own] == [0.5, 0.1]


@pytest.mark.parametrize("kind", ["tensor", "parameter of a frozen model"])
@levels
def test_an_optimizer_may_train_an_input_of_a_model(level, kind):
    """Style transfer, adversarial patches and inversions of GANs do."""
    model, image = t.net(), torch.full((2, 4), 0.5, requires_grad=True)
    if kind != "tensor":
        model.requires_grad_(False)
        image = nn.Parameter(image.detach())
    optimizer = torch.optim.SGD([image], lr=0.1)
    expected = image.detach() - 0.1 * torch.autograd.grad(t.net()(image).sum(), image)[0]
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    with amp.scale_loss(model(image).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert image.dtype is torch.float32
    torch.testing.assert_close(image.detach(), expected, atol=1e-3, rtol=0)
    assert not torch.equal(image.detach(), torch.full((2, 4), 0.5))


# -- groups change ---------------------------------------------------------------------------


@levels
def test_a_plain_module_added_later_is_trained(level):
    model, optimizer = t.prepared(level)
    head = nn.Linear(2, 2)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    before = t.values(head.parameters())
    both = nn.Sequential(model, head)
    train(both, optimizer)
    assert not t.same(before, t.values(head.parameters()))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda w: {"params": [w]}, ValueError, "parameter"),
        (lambda w: [w], TypeError, "must be a dict"),
        (lambda w: {"param": [w], "lr": 1}, KeyError, "params"),
    ],
    ids=["stepped", "no dict", "no params"],
)
@levels
def test_a_bad_group_is_refused_and_nothing_changes(level, make, error, words):
    model, optimizer = t.prepared(level)
    with pytest.raises(error, match=words):
        optimizer.add_param_group(make(model[0].weight))
    assert len(optimizer.param_groups) == 1


@levels
def test_groups_that_are_built_anew_step_the_same_masters(level):
    (model, optimizer), expected = (t.prepared(level, t.OPTIMIZERS["Adam"]) for _ in range(2))
    train(model, optimizer)
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": model.parameters()})
    train(model, optimizer)
    train(*expected)
    train(*expected)
    assert t.same(t.masters(optimizer), t.masters(expected[1]))
    del optimizer.param_groups[0]["params"][0]
    optimizer.add_param_group({"params": [model[0].weight]})
    assert len(t.masters(optimizer)) == 4


@pytest.mark.parametrize("step", [t.train_step, t.train_step_with_closure])
@levels
def test_a_group_that_a_script_fills_with_the_models_parameters_steps_masters(level, step):
    ends = []
    for fills in (False, True):
        model, optimizer = t.prepared(level, t.OPTIMIZERS["Adam"])
        for x, y in t.batches(3):
            step(model, optimizer, x, y)
            if fills:
                optimizer.param_groups[0]["params"] = list(model.parameters())
        step(model, optimizer, x, y)
        ends.append((t.masters(optimizer), t.values(model.parameters())))
    assert t.same(*ends)


@levels
def test_a_scheduler_sets_the_rate_of_the_groups_that_are_stepped(level):
    def moves(rate_factor):
        model, optimizer = t.prepared(level)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: rate_factor)
        before = t.masters(optimizer)
        train(model, optimizer, 1)
        scheduler.step()
        return not t.same(before, t.masters(optimizer))

    assert (moves(0.0), moves(1.0)) == (False, True)


# -- frozen weights --------------------------------------------------------------------------


@levels
def test_a_frozen_parameter_stays_and_gets_its_master_when_it_is_unfrozen(level):
    model = t.net()
    model[0].requires_grad_(False)
    model, optimizer = t.prepared(level, t.OPTIMIZERS["Adam"], model)
    before = t.values(model[0].parameters())
    train(model, optimizer)
    assert t.same(before, t.values(model[0].parameters()))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model[0].requires_grad_(True)
    train(model, optimizer)
    assert not t.same(before, t.values(model[0].parameters()))
    assert optimizer.param_groups[0]["params"][0].dtype is torch.float32


@pytest.mark.parametrize("level", ["O5"])  # at O2 a plain backward reaches no master
def test_a_frozen_parameter_with_a_gradient_is_stepped_as_torch_does(level):
    def trained(prepares):
        model = t.net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        t.loss_of(model, *t.batch()).backward()
        optimizer.step()
        model[0].requires_grad_(False)
        if prepares:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        optimizer.step()
        return [param.float() for param in optimizer.param_groups[0]["params"]]

    for own, wanted in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called before any backward pass")
@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
@levels
def test_what_has_no_gradient_stays_as_it_is(level, name):
    model, optimizer = t.prepared(level, t.OPTIMIZERS[name])
    before = t.values(model.parameters()), t.masters(optimizer)
    optimizer.step()
    assert t.same(before, (t.values(model.parameters()), t.masters(optimizer)))
    unused = nn.Linear(4, 8)
    optimizer.add_param_group({"params": unused.parameters()})
    before = t.values(unused.parameters())
    train(model, optimizer)
    assert t.same(before, t.values(unused.parameters()))


# -- two optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("nets", [1, 2])
@levels
def test_one_loss_for_two_optimizers_trains_like_one_over_all(level, nets):
    runs = []
    for split in (True, False):
        models = [t.net(seed) for seed in range(nets)]
        parts = models if nets == 2 else [models[0][0], models[0][2]]
        groups = [list(p.parameters()) for p in (parts if split else [nn.ModuleList(parts)])]
        optimizers = [t.OPTIMIZERS["Adam"](group) for group in groups]
        amp.initialize(models, optimizers, opt_level=level, verbosity=0)
        for x, y in t.batches(3):
            loss = sum(t.loss_of(model, x, y) for model in models)
            with amp.scale_loss(loss, optimizers) as scaled_loss:
                scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        runs.append([t.values(model.parameters()) for model in models])
    assert t.same(*runs)
