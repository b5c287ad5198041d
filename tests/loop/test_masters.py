"""Rule C: masters follow weights at the step, and the model follows masters at the forward."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import training as t

LEVELS = t.WITH_MASTERS


@pytest.mark.parametrize("level", LEVELS)
def test_masters_hold_the_values_from_before_rounding(level):
    wanted = t.values(t.net().parameters())
    _, optimizer = t.prepared(level)
    assert t.same(wanted, t.masters(optimizer))
    assert all(param.dtype is torch.float32 for param in amp.master_params(optimizer))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", ["copy_", "data.copy_", "data", "foreach"])
def test_what_is_written_into_masters_reaches_the_model(level, write):
    model, optimizer = t.prepared(level)
    t.train_step(model, optimizer, *t.batch())
    new = [torch.full_like(p, 0.25) for p in amp.master_params(optimizer)]
    if write == "foreach":
        with torch.no_grad():
            torch._foreach_copy_(list(amp.master_params(optimizer)), new)
    else:
        t.change(amp.master_params(optimizer), new, write)
    model(t.batch()[0])
    assert all(torch.equal(p.float(), torch.full_like(p, 0.25).float()) for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", ["copy_", "data"])
def test_written_weights_reach_the_masters_where_they_differ(level, write):
    model, optimizer = t.prepared(level)
    t.train_step(model, optimizer, *t.batch())
    before = t.masters(optimizer)
    new = t.values(model.parameters())
    for value in new:
        value.view(-1)[0] = 0.5
    t.change(model.parameters(), new, write)
    after = t.masters(optimizer)
    for old, value in zip(before, after, strict=True):
        assert value.view(-1)[0] == 0.5
        assert torch.equal(old.view(-1)[1:], value.view(-1)[1:])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by", ["copy_", "data", "data.copy_"])
def test_weights_swapped_and_put_back_leave_masters_as_they_were(level, by):
    runs = []
    for swaps in (True, False):
        model, optimizer = t.prepared(level)
        for x, y in t.batches(3):
            own = t.values(model.parameters())
            if swaps:
                t.change(model.parameters(), [torch.zeros_like(p) for p in own], by)
                model(x)
                t.change(model.parameters(), own, by)
            t.train_step(model, optimizer, x, y)
        runs.append(t.masters(optimizer))
    assert t.same(*runs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("part", ["model", "submodule"])
def test_loaded_weights_reach_the_masters_exactly(level, part):
    model, optimizer = t.prepared(level)
    t.train_step(model, optimizer, *t.batch())
    other = t.net(5)
    if part == "model":
        model.load_state_dict(other.state_dict())
        wanted = t.values(other.parameters())
    else:
        model[0].load_state_dict(other[0].state_dict())
        wanted = t.values(other[0].parameters()) + t.masters(optimizer)[2:]
    assert t.same(wanted, t.masters(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_state_dict_of_any_submodule_is_exact_fp32(level):
    model, optimizer = t.prepared(level)
    t.train_step(model, optimizer, *t.batch())
    wanted = t.masters(optimizer)
    assert t.same(list(model.state_dict().values()), wanted)
    assert t.same(list(model[2].state_dict().values()), wanted[2:])


@pytest.mark.parametrize("level", LEVELS)
def test_written_on_both_sides_the_master_wins(level):
    model, optimizer = t.prepared(level)
    t.train_step(model, optimizer, *t.batch())
    with torch.no_grad():
        for master, param in zip(amp.master_params(optimizer), model.parameters(), strict=True):
            param.fill_(1.0)
            master.fill_(0.5)
    model(t.batch()[0])
    assert all((param == 0.5).all() for param in model.parameters())


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
def test_a_loaded_checkpoint_continues_bit_exactly(level, name):
    scale = {} if level == "O5" else {"loss_scale": 64.0}
    model, optimizer = t.prepared(level, t.OPTIMIZERS[name], **scale)
    data = list(t.batches(6))
    for x, y in data[:3]:
        t.train_step(model, optimizer, x, y)
    state = t.saved_and_loaded([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    for x, y in data[3:]:
        t.train_step(model, optimizer, x, y)
    wanted = t.masters(optimizer)
    model, optimizer = t.prepared(level, t.OPTIMIZERS[name], model=t.net(7), **scale)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    amp.load_state_dict(state[2])
    for x, y in data[3:]:
        t.train_step(model, optimizer, x, y)
    assert t.same(wanted, t.masters(optimizer))


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_a_deep_copy_of_model_and_optimizer_trains_equally(level):
    model, optimizer = t.prepared(level, t.OPTIMIZERS["Adam"], loss_scale=64.0)
    t.train_step(model, optimizer, *t.batch())
    other, other_optimizer = copy.deepcopy((model, optimizer))
    for x, y in t.batches(3):
        one, two = (
            t.train_step(*each, x, y) for each in ((model, optimizer), (other, other_optimizer))
        )
        assert torch.equal(one, two)
    assert t.same(t.masters(optimizer), t.masters(other_optimizer))


@pytest.mark.parametrize("level", t.LEVELS_SHORT)
def test_restore_gives_trained_weights_back_to_the_last_bit(level):
    model, optimizer = t.prepared(level, loss_scale=64.0)
    t.train_step(model, optimizer, *t.batch())
    wanted = t.masters(optimizer)
    amp.restore(model, optimizer)
    assert t.same(wanted, t.values(model.parameters()))
    assert [p for g in optimizer.param_groups for p in g["params"]] == list(model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_sharpness_aware_step_perturbs_the_model(level):
    model, optimizer = t.prepared(level, loss_scale=1.0)
    x, y = t.batch()
    t.backward(model, optimizer, x, y)
    own = t.masters(optimizer)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.add_(master.grad, alpha=0.5)
    optimizer.zero_grad()
    perturbed = t.values(amp.master_params(optimizer))
    t.backward(model, optimizer, x, y)
    rounded = [value.to(p.dtype) for value, p in zip(perturbed, model.parameters(), strict=True)]
    assert t.same(t.values(model.parameters()), rounded)
    t.change(amp.master_params(optimizer), own, "copy_")
    optimizer.step()
    assert not t.same(own, t.masters(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_made_over_the_masters_trains_the_model(level):
    model, optimizer = t.prepared(level, loss_scale=1.0)
    other = torch.optim.AdamW(amp.master_params(optimizer), lr=1e-2, fused=True)
    for x, y in t.batches(2):
        other.zero_grad()
        t.backward(model, optimizer, x, y)
        other.step()
    for master, param in zip(t.masters(optimizer), model.parameters(), strict=True):
        assert torch.equal(master.to(param.dtype), param)


@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_over_the_same_weights_share_one_master(level):
    model = t.net()
    optimizers = [t.sgd(model.parameters()), t.sgd(model.parameters(), lr=0.01)]
    model, optimizers = amp.initialize(
        model, optimizers, opt_level=level, verbosity=0, loss_scale=8.0
    )
    one, other = map(list, map(amp.master_params, optimizers))
    assert all(a is b for a, b in zip(one, other, strict=True))
    for optimizer in optimizers:
        t.train_step(model, optimizer, *t.batch())
    assert t.same(
        [m.to(p.dtype) for m, p in zip(one, model.parameters(), strict=True)],
        t.values(model.parameters()),
    )


@pytest.mark.parametrize("level", LEVELS)
def test_batch_norm_parameters_are_their_own_masters(level):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer = t.prepared(level, model=model, loss_scale=8.0)
    stepped = list(amp.master_params(optimizer))
    assert model[1].weight is stepped[2]
    t.train_step(model, optimizer, *t.batch())
