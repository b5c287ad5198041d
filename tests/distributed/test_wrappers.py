"""Wrappers in unusual places: compiled, copied, several of one optimizer; dropped gradients."""

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from apex.parallel import DistributedDataParallel as ApexDistributedDataParallel
from tests.distributed.test_data_parallel import (
    START_SCALE,
    backward,
    batch,
    initialized,
    net,
    prepare,
    state,
)
from tests.support.training import WITH_MASTERS, masters

pytestmark = pytest.mark.distributed

DYNAMIC = ("O1", "O2")
ENTRIES = ("O1", "O2", "O5")


def accumulate(rank, parallel, optimizer, model, updates=3):
    for step in range(2 * updates):
        with contextlib.nullcontext() if step % 2 else parallel.no_sync():
            backward(parallel, optimizer, *batch(rank, step))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return state(model, optimizer)


# -- compiled --------------------------------------------------------------------------------

COMPILED = {
    "the wrapper": lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"),
    "inside": lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager")),
}


def accumulate_compiled(rank, level, where):
    try:
        model, optimizer = prepare(level, seed=rank)
        return accumulate(rank, COMPILED[where](model), optimizer, model)
    finally:
        torch._dynamo.reset()


def accumulate_eager(rank, level):
    model, optimizer = prepare(level, seed=rank)
    return accumulate(rank, DistributedDataParallel(model), optimizer, model)


@pytest.mark.parametrize("where", COMPILED)
@pytest.mark.parametrize("level", ENTRIES)
def test_no_sync_of_compiled_models_is_that_of_eager_ones(on_two_ranks, level, where):
    first, second = on_two_ranks(accumulate_compiled, level, where)
    assert first == second
    eager = on_two_ranks(accumulate_eager, level)[0]
    for ours, theirs in zip(first["masters"], eager["masters"], strict=True):
        torch.testing.assert_close(
            torch.tensor(ours), torch.tensor(theirs), rtol=2.0**-7, atol=2.0**-7
        )


def accumulate_in_copies(rank, level):
    model, optimizer = copy.deepcopy(prepare(level, seed=rank))
    return accumulate(rank, DistributedDataParallel(model), optimizer, model)


@pytest.mark.parametrize("level", ENTRIES)
def test_copies_under_a_wrapper_of_their_own_train_as_the_original(on_two_ranks, level):
    first, second = on_two_ranks(accumulate_in_copies, level)
    assert first == second == on_two_ranks(accumulate_eager, level)[0]


def several(rank, level, count):
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        models = [nn.Linear(4, 4) for _ in range(count)]
    optimizer = torch.optim.SGD(models[-1].parameters(), lr=0.1, momentum=0.9)
    models, optimizer = initialized(level, models, optimizer)
    return models, optimizer, [DistributedDataParallel(model) for model in models]


def chain(parts, optimizer, x):
    for part in parts:
        x = torch.tanh(part(x))
    with amp.scale_loss(x.float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()


def train_one_optimizer_of_several_wrappers(rank, level):
    models, optimizer, parallel = several(rank, level, 5)
    optimizer.add_param_group({"params": [p for model in models[:-1] for p in model.parameters()]})
    for step in range(2):
        chain(parallel, optimizer, batch(rank, step)[0])
        optimizer.step()
        optimizer.zero_grad()
    return state(nn.ModuleList(models), optimizer)


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_masters_of_several_wrappers_are_sent_in_one_order(on_two_ranks, level):
    first, second = on_two_ranks(train_one_optimizer_of_several_wrappers, level)
    assert first == second


def train_a_late_group(rank, level):
    models, optimizer, (early, late) = several(rank, level, 2)
    chain([lambda x: early(x).detach(), late], optimizer, batch(rank, 0)[0])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": list(models[0].parameters())})
    with early.no_sync():
        chain([early, late], optimizer, batch(rank, 1)[0])
    chain([early, late], optimizer, batch(rank, 2)[0])
    optimizer.step()
    return state(nn.ModuleList(models), optimizer)


@pytest.mark.parametrize("level", ENTRIES)
def test_the_wrapper_of_a_late_group_is_asked_for_no_sync(on_two_ranks, level):
    first, second = on_two_ranks(train_a_late_group, level)
    assert first == second


# -- gradients that are dropped or zeroed ----------------------------------------------------


def drop_by_hand(rank, level):
    model, optimizer = prepare(level, seed=rank)
    parallel = DistributedDataParallel(model)
    x, y = batch(rank, 0)
    x[0, 0] = float("inf") if rank == 0 else 0.0
    with parallel.no_sync():
        backward(parallel, optimizer, x, y)
    for param in (*model.parameters(), *amp.master_params(optimizer)):
        param.grad = None
    backward(parallel, optimizer, *batch(rank, 1))
    optimizer.step()
    return state(model, optimizer)


@pytest.mark.parametrize("level", DYNAMIC)
def test_an_overflow_whose_gradients_are_set_to_none_moves_no_scale(on_two_ranks, level):
    first, second = on_two_ranks(drop_by_hand, level)
    assert first == second
    assert first["scales"]["loss_scaler0"] == {"loss_scale": START_SCALE, "unskipped": 1}


def zero_in_place(rank, level, views):
    model, optimizer = prepare(level, seed=rank)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=views)
    for step in range(3):
        backward(parallel, optimizer, *batch(rank, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return state(model, optimizer)


@pytest.mark.parametrize("level", ENTRIES)
def test_gradients_in_buckets_can_be_zeroed_in_place(on_two_ranks, level):
    first, second = on_two_ranks(zero_in_place, level, True)
    assert first == second == on_two_ranks(zero_in_place, level, False)[0]


# -- after a join ----------------------------------------------------------------------------


def train_unevenly(rank, level, **options):
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    parallel = DistributedDataParallel(model)
    with parallel.join():
        for step in range(2 + 2 * rank):
            backward(parallel, optimizer, *batch(rank, step))
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, parallel


def share_scales_after_join(rank, level):
    options = {"growth_interval": 3, "max_loss_scale": 2.0**17}
    _, optimizer, parallel = train_unevenly(rank, level, **options)
    own = amp.state_dict()["loss_scaler0"]["loss_scale"]
    scales = [amp.state_dict()]
    torch.distributed.broadcast_object_list(scales, src=0)
    amp.load_state_dict(scales[0])
    for step in range(4):
        backward(parallel, optimizer, *batch(rank, 10 + step))
        optimizer.step()
        optimizer.zero_grad()
    return own, [value.tolist() for value in masters(optimizer)], dict(amp.state_dict())


@pytest.mark.parametrize("level", DYNAMIC)
def test_scales_that_parted_in_a_join_are_brought_together_as_the_docs_say(on_two_ranks, level):
    (own, *first), (other, *second) = on_two_ranks(share_scales_after_join, level)
    assert own != other
    assert first == second


def watch_join(rank, level):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("apex")
    logger.addHandler(handler)
    try:
        train_unevenly(rank, level)
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "join" in line]


@pytest.mark.parametrize(("level", "lines"), [("O1", 1), ("O5", 0)])
def test_a_join_with_a_dynamic_scale_is_told_once_on_rank_zero(on_two_ranks, level, lines):
    first, second = on_two_ranks(watch_join, level)
    assert len(first) == lines
    assert second == []


# -- made too early --------------------------------------------------------------------------


def wrapped_first(rank, level, compiled):
    """Trains under a wrapper whose model is prepared afterwards; or returns the error."""
    wrapper = DistributedDataParallel(net(rank))
    wrapper.module, optimizer = initialized(level, wrapper.module)
    parallel = torch.compile(wrapper, backend="eager") if compiled else wrapper
    try:
        with torch.no_grad():
            wrapper(batch(rank, 0)[0])
        for step in range(3):
            backward(parallel, optimizer, *batch(rank, step))
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    return state(wrapper, optimizer)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_wrapper_made_before_its_parameters_are_cast_is_told_the_order(
    on_two_ranks, level, compiled
):
    for told in on_two_ranks(wrapped_first, level, compiled):
        assert "before its parameters were cast" in told
        assert "Call amp.initialize first" in told


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_a_wrapper_of_parameters_that_keep_their_dtype_may_be_made_first(on_two_ranks, level):
    first, second = on_two_ranks(wrapped_first, level, False)
    assert not isinstance(first, str)
    assert first == second


def apex_wrapper_made_first(rank, delays):
    wrapper = ApexDistributedDataParallel(net(rank), delay_allreduce=delays)
    wrapper.module, optimizer = initialized("O5", wrapper.module)
    try:
        backward(wrapper, optimizer, *batch(rank, 0))
    except RuntimeError as error:
        return str(error)
    optimizer.step()
    return state(wrapper, optimizer)


def test_apex_s_wrapper_is_told_too_unless_it_reduces_after_the_pass(on_two_ranks):
    for told in on_two_ranks(apex_wrapper_made_first, False):
        assert "before its parameters were cast to bfloat16" in told
    first, second = on_two_ranks(apex_wrapper_made_first, True)
    assert first == second
