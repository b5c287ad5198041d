"""Prepared models and optimizers copied, pickled, or saved as whole objects."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops

levels = pytest.mark.parametrize("level", loops.LEVELS_SHORT)
masters = pytest.mark.parametrize("level", loops.WITH_MASTERS)


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def everything(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return loops.values(model.parameters()), loops.masters(optimizer), state


# -- copies ----------------------------------------------------------------------------------


@levels
def test_a_deep_copy_shares_nothing_with_the_original(level):
    original = loops.trained(level, loops.fused_adamw_of)
    loops.backward(*original, *loops.batch())
    before, grads = everything(*original), loops.grads(amp.master_params(original[1]))
    model, optimizer = copied = copy.deepcopy(original)
    model.zero_grad()
    assert all(param.grad is None for param in amp.master_params(optimizer))
    loops.train(*copied, 2)
    assert not loops.same(before[:2], everything(*copied)[:2])
    state = loops.net(seed=4).state_dict()
    model.load_state_dict(state)
    assert loops.same(list(state.values()), loops.masters(optimizer))
    amp.restore(*copied)
    assert loops.same(list(state.values()), loops.values(model.parameters()))
    assert loops.same(before, everything(*original))
    assert loops.same(grads, loops.grads(amp.master_params(original[1])))


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
def test_a_copy_has_the_weights_that_were_written_since_the_last_step(copied_by, elsewhere):
    model, optimizer = loops.trained("O5")
    expected = loops.masters(optimizer)
    with torch.no_grad():
        model[0].weight.view(-1)[1:] = expected[0].view(-1)[1:] = 0.25
        if elsewhere:
            model[0].weight.data = model[0].weight.detach().clone()
    copied, copied_optimizer = copied_by((model, optimizer))
    assert loops.same(loops.masters(copied_optimizer), expected)
    assert loops.same(loops.values(copied.parameters()), loops.values(model.parameters()))


def test_a_copy_made_while_weights_are_swapped_leaves_the_masters():
    model, optimizer = loops.trained("O5")
    own, expected = loops.values(model.parameters()), loops.masters(optimizer)
    loops.change(model.parameters(), map(torch.zeros_like, own), "copy_")
    copy.deepcopy((model, optimizer))
    loops.change(model.parameters(), own, "copy_")
    optimizer.zero_grad()
    loops.loss_of(model, *loops.batch()).mul(0).backward()
    optimizer.step()
    assert loops.same(loops.masters(optimizer), expected)


@masters
def test_in_inference_mode_a_model_is_copied_and_masters_are_not(level):
    model, optimizer = loops.trained(level)
    saved = model.state_dict()
    with torch.inference_mode():
        copied = copy.deepcopy(model)
        copied.load_state_dict(saved)
        found = dict(copied.state_dict())
        with pytest.raises(RuntimeError, match=r"version counter"):
            copy.deepcopy((model, optimizer))
    low = loops.LEVELS[level].stored
    assert loops.same(found, {name: value.to(low).float() for name, value in saved.items()})
    loops.train(model, optimizer, 2)


@masters
def test_a_model_copied_alone_has_rounded_weights_and_outlives_the_session(level):
    model, optimizer = loops.trained(level)
    rounded = [param.detach().float() for param in model.parameters()]
    copied = copy.deepcopy(model)
    del model, optimizer
    gc.collect()
    assert amp.state_dict() == {}
    assert loops.same(rounded, list(copied.state_dict().values()))


# -- whole objects in files ------------------------------------------------------------------


@levels
def test_a_model_saved_whole_computes_and_saves_what_the_original_does(level):
    model, _optimizer = loops.trained(level)
    loaded = loops.saved_and_loaded(model)
    x, _ = loops.batch()
    assert loops.same(model(x), loaded(x))
    # The masters stay with the optimizer: what was saved whole is the rounded weights.
    rounded = {
        name: value.to(loaded.get_parameter(name).dtype).float()
        for name, value in model.state_dict().items()
    }
    assert loops.same(rounded, dict(loaded.state_dict()))


@levels
def test_a_model_saved_whole_is_trained_on_after_restore_with_its_masters_loaded(level):
    model, optimizer = loops.trained(level)
    loaded = loops.saved_and_loaded(model)
    if level != "O1":  # a model that casts no parameters is saved as plain
        amp.restore(loaded)
    loaded.load_state_dict(model.state_dict())
    resumed = loops.prepared(level, model=loaded)
    for pair in ((model, optimizer), resumed):
        loops.train(*pair, 2, seed=2)
    assert loops.same(dict(model.state_dict()), dict(loaded.state_dict()))


@levels
def test_an_unpickled_pair_keeps_classes_state_and_masters_and_is_restored(level):
    original = loops.trained(level, loops.OPTIMIZERS["Adam"])
    model, optimizer = pickled(original)
    assert type(optimizer) is type(original[1])
    assert loops.same(everything(*original), everything(model, optimizer))
    expected = loops.masters(optimizer)
    amp.restore(model, optimizer)
    assert (type(model), type(optimizer)) == (nn.Sequential, torch.optim.Adam)
    assert loops.same(expected, loops.values(model.parameters()))
    params = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_an_unpickled_pair_trains_on_with_a_plain_backward(level):
    original = loops.trained(level, loops.OPTIMIZERS["Adam"])
    model, optimizer = pickled(original)
    loops.plain_step(model, optimizer, *loops.batch(2))
    loops.train_step(*original, *loops.batch(2))
    assert loops.same(everything(*original), everything(model, optimizer))


def test_an_unpickled_optimizer_is_refused_by_scale_loss():
    alive = loops.prepared("O1")
    model, optimizer = pickled(alive)
    with pytest.raises(RuntimeError, match="unpickled"):
        loops.backward(model, optimizer, *loops.batch())
