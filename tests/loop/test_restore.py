"""``amp.restore``: the same objects, plain and in fp32, go on as if amp had never been there."""

import copy

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex.parallel import LARC
from tests.support.steps import (
    LEVELS,
    Net,
    backward,
    live_sessions,
    loss_of,
    nothing_changes,
    prepared,
    sgd,
    slope,
    train,
)

every_level = pytest.mark.parametrize("level", LEVELS)
levels = pytest.mark.parametrize("level", ["O1", "O2", "O5"])


def hooks(model):
    return sum(len(v) for m in model.modules() for k, v in vars(m).items() if k.endswith("_hooks"))


@every_level
def test_the_same_objects_come_back_plain(level):
    model = Net()
    optimizer = sgd(model)
    exact = copy.deepcopy(model.state_dict())
    before = set(vars(model)), set(vars(optimizer)), hooks(model)
    params, group = list(model.parameters()), optimizer.param_groups[0]
    listed = group["params"]
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert amp.restore(model, optimizer) == (model, optimizer)
    assert (type(model), type(optimizer)) == (Net, torch.optim.SGD)
    assert (set(vars(model)), set(vars(optimizer)), hooks(model)) == before
    assert all(map(lambda a, b: a is b, model.parameters(), params))
    assert all(map(lambda a, b: a is b, amp.master_params(optimizer), params))
    assert optimizer.param_groups[0] is group
    assert group["params"] is listed
    if level != "O3":
        torch.testing.assert_close(model.state_dict(), exact, rtol=0, atol=0)
    assert (live_sessions(), amp.state_dict()) == (0, {})
    assert not torch.is_autocast_enabled("cpu")


@every_level
def test_values_gradients_and_state_go_with_it_and_training_goes_on_in_fp32(level):
    model, optimizer = prepared(level, optimizer=lambda m: sgd(m, momentum=0.5))
    first = train(model, optimizer)
    optimizer.zero_grad()
    backward(slope(model.last, 0.25), optimizer)
    masters = [p.detach().float() for p in amp.master_params(optimizer)]
    momentum = [optimizer.state[p]["momentum_buffer"].float() for p in amp.master_params(optimizer)]
    amp.restore(model, optimizer)
    assert all(map(torch.equal, model.parameters(), masters))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    after = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(map(torch.equal, after, momentum))
    grad = model.last.weight.grad
    assert (grad.dtype, grad.unique().tolist()) == (torch.float32, [0.25])
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] < first[0]
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    losses = train(model, optimizer, steps=4)
    assert losses[-1] < losses[0]


@levels
@pytest.mark.parametrize("early", [True, False])
def test_a_scheduler_works_on(level, early):
    model = Net()
    optimizer = sgd(model)

    def make():
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    scheduler = make() if early else None
    larc = LARC(optimizer)
    amp.initialize(model, larc, opt_level=level, verbosity=0)
    scheduler = scheduler or make()
    train(model, optimizer, steps=1)
    scheduler.step()
    assert amp.restore([model], (larc,)) == ([model], (larc,))
    before = model.last.weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125 / 4
    assert not torch.equal(model.last.weight, before)


@pytest.mark.parametrize("fails", ["forward", "step"])
@levels
def test_the_session_ends_also_while_the_traceback_of_a_failure_lives(level, fails):
    model, optimizer = prepared(level)

    def fail(*given):
        raise ValueError

    owner = model.last if fails == "forward" else optimizer
    handle = getattr(owner, f"register_{fails}_pre_hook")(fail)
    try:
        train(model, optimizer, steps=1)
    except ValueError:  # falls back to fp32
        handle.remove()
        amp.restore(model, optimizer)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert amp.state_dict() == {}


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_stay_on_for_a_model_that_is_not_restored(level):
    models = [Net(), Net()]
    amp.initialize(models, opt_level=level, verbosity=0)
    amp.restore(models[0])
    x = torch.ones(2, 4)
    assert models[1](x).dtype is not torch.float32
    with amp.disable_casts():
        assert models[0](x).dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_restored_alone_is_fp32_and_its_prepared_optimizer_trains_it_on(level):
    model, optimizer = prepared(level)
    first = train(model, optimizer)
    amp.restore(model)
    assert all(map(torch.equal, model.parameters(), amp.master_params(optimizer)))
    losses = train(model, optimizer)
    assert losses[-1] < losses[0] < first[0]


# -- refusals --------------------------------------------------------------------------------


def refused(error, words, model, optimizer=None):
    objects = [
        each for part in (model, optimizer) for each in (part if type(part) is list else [part])
    ]
    with nothing_changes(*objects), pytest.raises(error, match=words):
        amp.restore(model, optimizer)


@levels
def test_what_amp_has_not_prepared_is_refused_and_nothing_changes(level):
    model, optimizer = prepared(level)
    words = r"model \(Net\) that amp has not prepared\. Pass the model that amp\.initialize"
    refused(ValueError, words, Net())
    refused(ValueError, words, [model, Net()], optimizer)
    refused(ValueError, r"optimizer \(SGD\) that amp has not prepared", model, sgd(model))
    refused(ValueError, "without a wrapper", nn.DataParallel(model))
    refused(ValueError, "same model twice. Pass each model once", [model, model], optimizer)
    refused(TypeError, "got str instead of a model", "net")
    refused(TypeError, "got str instead of an optimizer", model, "sgd")
    amp.restore(model, optimizer)
    refused(ValueError, "has not prepared", model)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_with_masters_is_refused_without_its_model(level):
    first, second = prepared(level), prepared(level)
    words = r"masters of a model that was not passed.*amp\.restore\(model, optimizer\)"
    with nothing_changes(*first, *second), pytest.raises(ValueError, match=words):
        amp.restore(first[0], second[1])
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode.*no_grad\(\)"):
        amp.restore(*first)
    with torch.no_grad():
        amp.restore(*first)
    loss_of(first[0]).backward()
