"""Ranks under DistributedDataParallel stay together, and train like one process on all data."""

import contextlib
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import apex.parallel
from apex import amp
from apex._engine import distributed
from tests.training.cases import LEVELS, WITH_MASTERS, masters

pytestmark = pytest.mark.distributed

WRAPPERS = {
    "torch": DistributedDataParallel,
    "apex": apex.parallel.DistributedDataParallel,
    "apex delayed": lambda model: apex.parallel.DistributedDataParallel(
        model, delay_allreduce=True
    ),
    "torch views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "torch static": lambda model: DistributedDataParallel(model, static_graph=True),
}
START_SCALE = 2.0**8
EPS = {level: torch.finfo(LEVELS[level].compute).eps for level in LEVELS}


def net(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)


def prepare(level, seed):
    return initialized(level, net(seed))


def initialized(level, model, optimizer=None):
    # At the usual scale a rank's part may overflow where the joined batch does not.
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, max_loss_scale=START_SCALE
    )


def backward(model, optimizer, x, y, share=1.0, **options):
    loss = F.mse_loss(model(x).float(), y) * share
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def state(model, optimizer):
    """What has to be alike on all ranks."""
    model = getattr(model, "module", model)
    return {
        "masters": [value.tolist() for value in masters(optimizer)],
        "model": [param.detach().float().tolist() for param in model.parameters()],
        "scales": dict(amp.state_dict()),
    }


# -- parity ----------------------------------------------------------------------------------


def train(rank, level, wrapper, steps=20, poisoned=None):
    """Each rank has its own data and, before DDP, its own weights."""
    model, optimizer = prepare(level, seed=rank)
    parallel = WRAPPERS[wrapper](model)
    for step in range(steps):
        x, y = batch(rank, step)
        if poisoned == (rank, step):
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        backward(parallel, optimizer, x, y)
        optimizer.step()
    return state(parallel, optimizer)


def train_alone(level, ranks, steps=20):
    model, optimizer = prepare(level, seed=0)
    for step in range(steps):
        parts = [batch(rank, step) for rank in range(ranks)]
        optimizer.zero_grad()
        backward(model, optimizer, *(torch.cat(part) for part in zip(*parts, strict=True)))
        optimizer.step()
    return masters(optimizer)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_stay_alike_and_train_as_one_process_on_the_joined_batch(
    on_two_ranks, level, wrapper
):
    first, second = on_two_ranks(train, level, wrapper)
    assert first == second
    for ours, alone in zip(first["masters"], train_alone(level, 2), strict=True):
        torch.testing.assert_close(
            torch.tensor(ours), alone.float(), rtol=16 * EPS[level], atol=16 * EPS[level]
        )


@pytest.mark.parametrize("level", LEVELS)
def test_four_ranks_stay_alike(on_four_ranks, level):
    first, *others = on_four_ranks(train, level, "torch")
    assert all(other == first for other in others)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_inf_in_one_rank_skips_and_halves_on_all(on_two_ranks, level, wrapper):
    clean = on_two_ranks(train, level, wrapper, 2)[0]
    first, second = on_two_ranks(train, level, wrapper, 3, (1, 2))
    assert first == second
    assert first["masters"] == clean["masters"]
    assert first["scales"]["loss_scaler0"] == {"loss_scale": START_SCALE / 2, "unskipped": 0}


# -- accumulation under no_sync --------------------------------------------------------------


def accumulate(rank, level, wrapper, delay, poisoned=None):
    """Three updates of three passes each; only the last pass of an update communicates."""
    model, optimizer = prepare(level, seed=rank)
    parallel = WRAPPERS[wrapper](model)
    for update in range(3):
        for part in range(3):
            last = part == 2
            x, y = batch(rank, 3 * update + part)
            if poisoned == (rank, update, part):
                x[0, 0] = float("inf")
            with contextlib.nullcontext() if last else parallel.no_sync():
                backward(parallel, optimizer, x, y, 1 / 3, delay_unscale=delay and not last)
        optimizer.step()
        optimizer.zero_grad()
    return state(parallel, optimizer)


def accumulate_alone(level):
    model, optimizer = prepare(level, seed=0)
    for update in range(3):
        for part in range(3):
            for rank in range(2):
                backward(model, optimizer, *batch(rank, 3 * update + part), 1 / 6)
        optimizer.step()
        optimizer.zero_grad()
    return masters(optimizer)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "torch static"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_accumulated_without_sync_are_sent_with_the_last(
    on_two_ranks, level, wrapper, delay
):
    first, second = on_two_ranks(accumulate, level, wrapper, delay)
    assert first == second
    for ours, alone in zip(first["masters"], accumulate_alone(level), strict=True):
        torch.testing.assert_close(
            torch.tensor(ours), alone.float(), rtol=8 * EPS[level], atol=8 * EPS[level]
        )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_inf_without_sync_skips_the_update_on_all(on_two_ranks, level):
    first, second = on_two_ranks(accumulate, level, "torch", False, (0, 1, 0))
    assert first == second
    assert first["scales"]["loss_scaler0"] == {"loss_scale": START_SCALE / 2, "unskipped": 1}


def drop_a_poisoned_part(rank, level):
    model, optimizer = prepare(level, seed=rank)
    parallel = DistributedDataParallel(model)
    x, y = batch(rank, 0)
    if rank == 0:
        x[0, 0] = float("inf")
    with parallel.no_sync():
        backward(parallel, optimizer, x, y)
    optimizer.zero_grad()
    backward(parallel, optimizer, *batch(rank, 1))
    optimizer.step()
    return state(parallel, optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_that_was_dropped_before_it_was_sent_moves_no_scale(on_two_ranks, level):
    first, second = on_two_ranks(drop_a_poisoned_part, level)
    assert first == second
    assert first["scales"]["loss_scaler0"] == {"loss_scale": START_SCALE, "unskipped": 1}


def accumulate_in_step(rank, level):
    """Every pass communicates; gradients in buckets that the next pass writes into."""
    model, optimizer = prepare(level, seed=rank)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for part in range(2):
        backward(parallel, optimizer, *batch(rank, part))
    optimizer.step()
    return state(parallel, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_passes_that_all_communicate_add_up(on_two_ranks, level):
    first, second = on_two_ranks(accumulate_in_step, level)
    assert first == second
    model, optimizer = prepare(level, seed=0)
    for part in range(2):
        for rank in range(2):
            backward(model, optimizer, *batch(rank, part), 1 / 2)
    optimizer.step()
    for ours, alone in zip(first["masters"], masters(optimizer), strict=True):
        torch.testing.assert_close(
            torch.tensor(ours), alone.float(), rtol=4 * EPS[level], atol=4 * EPS[level]
        )


# -- exact masters ---------------------------------------------------------------------------


def resume(rank, level, early):
    """Trains, saves, and goes on in objects that were loaded, beside the ones that just go on."""
    model, optimizer = prepare(level, seed=rank)
    parallel = DistributedDataParallel(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(parallel, optimizer, *batch(rank, step))
        optimizer.step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, moments = torch.load(file, weights_only=True)

    again = net(seed=7 + rank)
    stepper = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    if early:
        again.load_state_dict(weights)
        stepper.load_state_dict(moments)
    again, stepper = initialized(level, again, stepper)
    if not early:
        again.load_state_dict(weights)
        stepper.load_state_dict(moments)
    started = again.state_dict()
    wrapped = DistributedDataParallel(again)
    for step in range(3, 6):
        for one, its in ((parallel, optimizer), (wrapped, stepper)):
            its.zero_grad()
            backward(one, its, *batch(rank, step))
            its.step()
    same_start = all(torch.equal(started[name], weights[name]) for name in weights)
    return same_start, state(parallel, optimizer), state(wrapped, stepper)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("level", WITH_MASTERS)
def test_a_run_of_two_ranks_resumes_to_the_last_bit(on_two_ranks, level, early):
    for same_start, went_on, resumed in on_two_ranks(resume, level, early):
        assert same_start
        assert resumed["masters"] == went_on["masters"]
        assert resumed["model"] == went_on["model"]


def train_in_groups(rank, level):
    """Two pairs of ranks, each a run of its own."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    model, optimizer = prepare(level, seed=rank)
    parallel = DistributedDataParallel(model, process_group=groups[rank // 2])
    for step in range(2):
        optimizer.zero_grad()
        backward(parallel, optimizer, *batch(rank, step))
        optimizer.step()
    return state(parallel, optimizer)


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_masters_are_shared_in_the_wrapper_s_own_group(on_four_ranks, level):
    first, second, third, fourth = on_four_ranks(train_in_groups, level)
    assert first == second
    assert third == fourth
    assert first["masters"] != third["masters"]


def train_unseen(rank, level):
    """As on a torch that does not tell which wrapper's forward pass runs."""
    distributed._KNOWS_ACTIVE = False
    try:
        return accumulate(rank, level, "torch", True)
    finally:
        distributed._KNOWS_ACTIVE = True


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_whose_wrapper_is_not_seen_stay_alike_with_delay_unscale(on_two_ranks, level):
    first, second = on_two_ranks(train_unseen, level)
    assert first == second


# -- join ------------------------------------------------------------------------------------


def train_unevenly(rank, level):
    model, optimizer = prepare(level, seed=rank)
    parallel = DistributedDataParallel(model)
    for epoch in range(2):
        with parallel.join():
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                backward(parallel, optimizer, *batch(rank, 10 * epoch + step))
                optimizer.step()
    backward(parallel, optimizer, *batch(rank, 99))
    return state(parallel, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_after_a_join_the_ranks_are_alike(on_two_ranks, level):
    first, second = on_two_ranks(train_unevenly, level)
    assert first["model"] == second["model"]
    assert first["masters"] == second["masters"]
