import copy
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import apex.amp as amp
from tests.amp.cases import (
    LEVELS,
    LOW,
    Net,
    live_sessions,
    loss_of,
    prepared,
    scale,
    sgd,
    train,
)

every_level = pytest.mark.parametrize("level", LEVELS)
ROUNDS = 50


def one_round(level):
    torch.manual_seed(0)
    model, optimizer = prepared(level, optimizer=lambda m: sgd(m, momentum=0.5))
    return [loss.hex() for loss in train(model, optimizer)], amp.state_dict()


def alive():
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(isinstance(each, torch.Tensor) for each in objects)


FRESH = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from tests.amp import test_sessions
for level in test_sessions.LEVELS:
    if not os.fork():
        print(level, test_sessions.one_round(level), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def fresh_process():
    """What one round at each level gives in a process that has done nothing else."""
    run = subprocess.run(
        [sys.executable, "-c", FRESH], stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(line.split(" ", 1) for line in run.stdout.splitlines())


@every_level
def test_50_rounds_leave_nothing_alive_and_give_the_results_of_a_fresh_process(
    level, fresh_process
):
    for _ in range(3):
        one_round(level)
    before = alive()
    results = [one_round(level) for _ in range(ROUNDS)]
    assert str(results[-1]) == str(results[0]) == fresh_process[level]
    kept = results[0]
    del results
    after = alive()
    assert after[1] == before[1]
    assert after[0] - before[0] < ROUNDS, kept
    assert live_sessions() == 0


def test_rounds_of_all_levels_by_turns_leave_nothing_alive():
    for level in LEVELS:
        one_round(level)
    before = alive()
    for _ in range(5):
        for level in LEVELS:
            one_round(level)
    after = alive()
    assert after[1] == before[1]
    assert after[0] - before[0] < 20


@every_level
def test_a_session_lives_as_long_as_its_model_or_its_optimizer(level):
    model, optimizer = prepared(level)
    assert live_sessions() == 1
    del model
    assert live_sessions() == 1
    del optimizer
    assert live_sessions() == 0
    model, optimizer = prepared(level)
    del optimizer
    assert live_sessions() == 1
    del model
    assert live_sessions() == 0


@every_level
def test_models_and_optimizers_are_freed(level):
    model, optimizer = prepared(level)
    train(model, optimizer)
    watched = [weakref.ref(each) for each in (model, optimizer, model.first.weight, model.norm)]
    watched += [weakref.ref(p) for p in amp.master_params(optimizer)]
    del model, optimizer
    gc.collect()
    assert [each() for each in watched] == [None] * len(watched)


@every_level
def test_a_failed_initialize_leaves_no_session(level):
    model = Net()
    with pytest.raises(ValueError, match="holds no parameter"):
        amp.initialize(model, sgd(Net()), opt_level=level)
    assert live_sessions() == 0
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("placeholder", [nn.Identity, list])
@pytest.mark.parametrize("level", LEVELS)
def test_the_optimizer_may_come_in_a_later_call_than_its_model(level, placeholder):
    model = Net().bfloat16().float()  # the first call has no optimizer, so it keeps no masters
    twin = copy.deepcopy(model)
    twin, optimizer = amp.initialize(twin, sgd(twin), opt_level=level, loss_scale=8.0, verbosity=0)
    model = amp.initialize(model, opt_level=level, num_losses=0, verbosity=0)
    assert list(amp._amp_state.loss_scalers) == []
    _, later = amp.initialize(
        placeholder(), sgd(model), opt_level=level, loss_scale=8.0, verbosity=0
    )
    train(twin, optimizer)
    train(model, later)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


# -- casts of the thread ---------------------------------------------------------------------


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_of_the_thread_end_with_the_session(level):
    model, optimizer = prepared(level)
    assert product() is LOW[level]
    del model, optimizer
    gc.collect()
    assert product() is torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_autocast_s_own_settings_come_back(level):
    before = (
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    keep = prepared(level)
    del keep
    gc.collect()
    after = (
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    assert after == before


def test_of_two_sessions_the_newest_living_one_rules():
    first = prepared("O1")
    second = prepared("O4")
    assert product() is torch.bfloat16
    del second
    gc.collect()
    assert product() is torch.float16
    del first
    gc.collect()
    assert product() is torch.float32


def test_sessions_may_end_in_any_order():
    first = prepared("O1")
    second = prepared("O4")
    del first
    gc.collect()
    assert product() is torch.bfloat16
    del second
    gc.collect()
    assert product() is torch.float32


def test_casts_stay_in_the_thread_of_initialize():
    keep = prepared("O4")
    found = []
    thread = threading.Thread(target=lambda: found.append(product()))
    thread.start()
    thread.join()
    assert found == [torch.float32]
    del keep


def test_a_prepared_model_casts_in_any_thread():
    model, _ = prepared("O4")
    found = []
    thread = threading.Thread(target=lambda: found.append(model(torch.ones(2, 4)).dtype))
    thread.start()
    thread.join()
    assert found == [torch.bfloat16]


def test_objects_may_be_freed_in_another_thread():
    box = [prepared("O4")]
    thread = threading.Thread(target=lambda: (box.clear(), gc.collect()))
    thread.start()
    thread.join()
    assert live_sessions() == 0
    keep = prepared("O5")
    loss_of(keep[0])
    assert product() is torch.float32


# -- sessions beside each other --------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_objects_may_be_freed_inside_a_backward_pass(level):
    held = [prepared(level)]
    x = torch.ones(2, requires_grad=True)

    def free(grad):  # as a garbage collection may do there
        held.clear()
        gc.collect()

    y = x * 2
    y.register_hook(free)
    y.sum().backward()
    assert not held
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_an_overflow_in_one_session_leaves_the_other_s_scale():
    first, second = prepared("O2"), prepared("O2")
    with amp.scale_loss(first[0].last.weight.sum() * torch.inf, first[1]) as scaled_loss:
        scaled_loss.backward()
    assert (scale(0), scale(1)) == (2.0**15, 2.0**16)
    del second


def test_a_model_without_optimizer_has_a_session_of_its_own():
    model = amp.initialize(nn.Linear(2, 2), opt_level="O5", verbosity=0)
    assert live_sessions() == 1
    del model
    assert live_sessions() == 0


def test_a_gan_in_two_calls_trains_each_by_its_own_scale():
    generator, discriminator = prepared("O2", loss_scale=8.0), prepared("O5", loss_scale=2.0)
    for _ in range(3):
        for model, optimizer in (generator, discriminator):
            train(model, optimizer, steps=1)
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [8.0, 2.0]
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [3, 3]


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_an_optimizer_whose_pass_is_still_held_may_go(level):
    """By a variable, or by the frames of a traceback."""
    nets = [Net(), Net()]
    optimizers = [sgd(net) for net in nets]
    nets, optimizers = amp.initialize(nets, optimizers, opt_level=level, verbosity=0)
    held = amp.scale_loss(loss_of(nets[0]), optimizers[0])
    with held as scaled_loss:
        scaled_loss.backward()
    del optimizers[0]
    gc.collect()
    train(nets[1], optimizers[0])
    with amp.debug.trace_overflow(nets[1]) as trace:
        train(nets[1], optimizers[0])
    assert trace.first is None
    prepared(level)
    assert held is not None
