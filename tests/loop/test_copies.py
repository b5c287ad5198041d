"""Checkpoints, deep copies, pickles and ``amp.restore`` in the middle of training."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

from apex import amp
from tests.support import training as cases
from tests.support.reference.loops import Loop

STEPPED = ["fused AdamW", "Adam", "SGD", "RMSprop"]


def train(model, optimizer, steps):
    for x, y in steps:
        cases.train_step(model, optimizer, x, y)


def everything(model, optimizer):
    return (
        cases.values(model.parameters()),
        cases.masters(optimizer),
        copy.deepcopy(optimizer.state_dict()["state"]),
    )


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_loaded_checkpoint_continues_bit_exactly(level, name, model_first):
    uninterrupted = cases.prepared(level, cases.OPTIMIZERS[name])
    train(*uninterrupted, cases.batches(3, overflow_at={1} if level in ("O1", "O2") else ()))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (*uninterrupted, amp)], file)
    train(*uninterrupted, cases.batches(3, seed=2))
    expected, scale = everything(*uninterrupted), cases.loss_scale()
    del uninterrupted

    file.seek(0)
    states = torch.load(file)
    resumed = cases.prepared(level, cases.OPTIMIZERS[name], model=cases.net(seed=5))
    order = zip((*resumed, amp), states, strict=True)
    for part, state in order if model_first else reversed(list(order)):
        part.load_state_dict(state)
    train(*resumed, cases.batches(3, seed=2))
    assert cases.same(expected, everything(*resumed))
    assert cases.loss_scale() == scale


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_deep_copy_keeps_fp32_values_of_buffers_and_frozen_weights(level, keeps):
    model = cases.net()
    model[2].requires_grad_(False)
    model[0].register_buffer("shift", torch.rand(8))
    original = cases.prepared(level, model=model, keep_fp32_values=keeps)
    copied = copy.deepcopy(original)
    for part, own in zip(copied, original, strict=True):
        assert cases.same(part.state_dict(), own.state_dict())
    before = original[0].state_dict()
    copied[0].load_state_dict({name: value * 3.0 for name, value in before.items()})
    assert cases.same(original[0].state_dict(), before)


@pytest.mark.parametrize("name", [*STEPPED, "fused SGD"])
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_a_deep_copy_of_model_and_optimizer_trains_equally(level, name):
    original = cases.prepared(level, cases.OPTIMIZERS[name])
    train(*original, cases.batches(2))
    copied = copy.deepcopy(original)
    for pair in (original, copied):
        train(*pair, cases.batches(2, seed=2))
    assert cases.same(everything(*original), everything(*copied))


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    "copied_by", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
def test_a_copy_has_the_weights_that_were_written_since_the_last_step(copied_by, elsewhere):
    model, optimizer = cases.prepared("O5")
    train(model, optimizer, cases.batches(2))
    expected = cases.masters(optimizer)
    with torch.no_grad():
        model[0].weight.view(-1)[1:] = expected[0].view(-1)[1:] = 0.25
        if elsewhere:
            model[0].weight.data = model[0].weight.detach().clone()
    copied, copied_optimizer = copied_by((model, optimizer))
    assert cases.same(cases.masters(copied_optimizer), expected)
    assert cases.same(cases.values(copied.parameters()), cases.values(model.parameters()))


def test_a_copy_made_while_weights_are_swapped_leaves_the_masters():
    model, optimizer = cases.prepared("O5")
    train(model, optimizer, cases.batches(2))
    own, masters = model[0].weight.detach().clone(), cases.masters(optimizer)
    with torch.no_grad():
        model[0].weight.fill_(0.25)
        copy.deepcopy((model, optimizer))
        model[0].weight.copy_(own)
    optimizer.zero_grad()
    cases.loss_of(model, *cases.batch()).mul(0).backward()
    optimizer.step()
    assert cases.same(cases.masters(optimizer), masters)


@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_training_a_deep_copy_leaves_the_original(level, name):
    original = cases.prepared(level, cases.OPTIMIZERS[name])
    train(*original, cases.batches(2))
    before = everything(*original)
    copied = copy.deepcopy(original)
    train(*copied, cases.batches(2))
    assert cases.same(before, everything(*original))
    assert not cases.same(before, everything(*copied))


@pytest.mark.parametrize("level", cases.LEVELS)
def test_a_deep_copy_made_in_inference_mode_loads_a_state_dict(level):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS["SGD"])
    saved = model.state_dict()
    train(model, optimizer, cases.batches(1))
    with torch.inference_mode():
        copied = copy.deepcopy(model)
        copied.load_state_dict(saved)
        found = copied.state_dict()
    for name, param in copied.named_parameters():
        assert cases.same(found[name], saved[name].to(param.dtype).float())


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_a_copy_with_its_masters_in_inference_mode_is_refused(level):
    model, optimizer = cases.prepared(level)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        copy.deepcopy((model, optimizer))
    train(model, optimizer, cases.batches(1))


@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_a_deep_copy_skips_on_overflow(level):
    copied = copy.deepcopy(
        cases.prepared(level, cases.OPTIMIZERS["fused AdamW"], loss_scale="dynamic")
    )
    before = cases.values(copied[0].parameters())
    train(*copied, cases.batches(1, overflow_at={0}))
    assert cases.same(before, cases.values(copied[0].parameters()))


@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_a_deep_copy_with_its_scheduler_trains_equally_and_warns_of_nothing(level):
    model, optimizer = cases.prepared(level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    original = (model, optimizer, scheduler)
    train(model, optimizer, cases.batches(1))
    scheduler.step()
    copied = copy.deepcopy(original)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own_model, own_optimizer, own_scheduler in (original, copied):
            train(own_model, own_optimizer, cases.batches(1, seed=2))
            own_scheduler.step()
    assert copied[1].param_groups[0]["lr"] == 0.025
    assert cases.same(everything(*original[:2]), everything(*copied[:2]))


@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_a_pickled_optimizer_keeps_class_groups_and_state(level, name):
    model, optimizer = cases.prepared(level, cases.OPTIMIZERS[name])
    train(model, optimizer, cases.batches(2))
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert type(loaded) is type(optimizer)
    assert cases.same(optimizer.state_dict()["state"], loaded.state_dict()["state"])
    assert cases.same(cases.masters(optimizer), cases.masters(loaded))


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_pickled_model_and_optimizer_train_on_with_a_plain_backward(level):
    original = cases.prepared(level, cases.OPTIMIZERS["Adam"])
    train(*original, cases.batches(1))
    model, optimizer = pickle.loads(pickle.dumps(original))
    optimizer.zero_grad()
    cases.loss_of(model, *cases.batch(2)).backward()
    optimizer.step()
    train(*original, [cases.batch(2)])
    assert cases.same(everything(*original), everything(model, optimizer))


def test_a_pickled_optimizer_is_refused_by_scale_loss():
    model, optimizer = pickle.loads(pickle.dumps(cases.prepared("O1")))
    alive = cases.prepared("O1")
    with pytest.raises(RuntimeError, match="unpickled"):
        cases.backward(model, optimizer, *cases.batch())
    del alive


IN_A_FRESH_PROCESS = """
import pickle, sys
optimizer = pickle.load(sys.stdin.buffer)
calls = []
optimizer.register_step_post_hook(lambda *_: calls.append("after"))
optimizer.step()
print(type(optimizer).__name__, optimizer.param_groups[0]["params"][0].dtype, calls)
"""


@pytest.mark.slow
def test_a_pickled_optimizer_loads_and_steps_in_a_fresh_process():
    _, optimizer = cases.prepared("O5")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS],
        input=pickle.dumps(optimizer),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout.decode() == "SGD torch.float32 ['after']\n"


@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("level", cases.LEVELS)
def test_restored_objects_train_on_like_a_plain_loop(level, name):
    restored = cases.prepared(level, cases.OPTIMIZERS[name])
    loop = Loop(level, cases.net().parameters(), cases.OPTIMIZERS[name])
    for x, y in cases.batches(3):
        cases.train_step(*restored, x, y)
        loop.train_step(x, y)
    plain = Loop("O0", loop.stepped, cases.OPTIMIZERS[name])
    for index, param in enumerate(plain.stepped):
        param.data = loop.stepped[index].detach().float()
    plain.optimizer.load_state_dict(loop.optimizer.state_dict())

    model, optimizer = amp.restore(*restored)
    for x, y in cases.batches(3, seed=2):
        optimizer.zero_grad()
        cases.loss_of(model, x, y).backward()
        optimizer.step()
        plain.train_step(x, y)
    assert cases.same(list(model.parameters()), plain.stepped)
    assert cases.same(optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"])


@pytest.mark.parametrize("level", cases.LEVELS)
def test_restored_objects_are_of_their_own_classes(level):
    model, optimizer = amp.restore(*cases.prepared(level))
    assert type(model) is torch.nn.Sequential
    assert type(optimizer) is torch.optim.SGD
    assert all(
        stepped is param
        for stepped, param in zip(
            optimizer.param_groups[0]["params"], model.parameters(), strict=True
        )
    )


@pytest.mark.parametrize("level", cases.LEVELS)
def test_restored_objects_can_be_prepared_again(level):
    pair = amp.restore(*cases.prepared(level))
    pair = amp.initialize(*pair, opt_level=level, verbosity=0)
    before = cases.masters(pair[1])
    train(*pair, cases.batches(1))
    assert not cases.same(before, cases.masters(pair[1]))


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("level", ["O0", *cases.MIXED])
def test_a_scheduler_goes_on_after_restore(level, scheduler_first):
    model = cases.net()
    optimizer = cases.sgd(model.parameters())
    if scheduler_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if not scheduler_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, cases.batches(1))
    scheduler.step()
    amp.restore(model, optimizer)
    before = cases.values(model.parameters())
    optimizer.zero_grad()
    cases.loss_of(model, *cases.batch()).backward()
    optimizer.step()
    scheduler.step()
    expected = [
        value.add(param.grad, alpha=-0.05)
        for value, param in zip(before, model.parameters(), strict=True)
    ]
    assert cases.same(expected, list(model.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("level", cases.WITH_MASTERS)
def test_restore_between_backward_and_step_keeps_the_gradients(level):
    model, optimizer = cases.prepared(level)
    cases.backward(model, optimizer, *cases.batch())
    expected = cases.grads(amp.master_params(optimizer))
    amp.restore(model, optimizer)
    assert cases.same(expected, cases.grads(model.parameters()))
