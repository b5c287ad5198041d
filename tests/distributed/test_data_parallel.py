"""Ranks under DistributedDataParallel stay together, and train like one process on all data."""

import contextlib
import gc
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from tests.distributed import cases
from tests.support import loops

level = loops.at_levels(*loops.DYNAMIC)

pytestmark = pytest.mark.distributed


ALL = [("O5", name) for name in cases.WRAPPERS] + [
    (level, name) for level in ("O1", "O2") for name in ("torch", "apex delayed")
]


def average_inside(rank, level, beside):
    """Without a wrapper, as docs/distributed.md says; rank 0 overflows in the second step."""
    warnings.filterwarnings("error", "Gradients were")
    model, optimizer = cases.prepare(level, seed=0)
    if beside:  # a model that a wrapper averages
        other, _ = cases.wrapped(level, seed=rank)
        other(cases.rank_batch(rank, 0)[0])
    skipped = []
    for step in range(3):
        x, y = cases.rank_batch(rank, step)
        if (rank, step) == (0, 1):
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        with amp.scale_loss(loops.loss_of(model, x, y), optimizer) as scaled_loss:
            scaled_loss.backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped, cases.state(model, optimizer)


# -- parity ----------------------------------------------------------------------------------


def train_rank(rank, level, wrapper, steps=20, poisoned=None):
    """Each rank has its own data and, before DDP, its own weights."""
    parallel, optimizer = cases.wrapped(level, rank, wrapper)
    batches = [cases.rank_batch(rank, step) for step in range(steps)]
    if poisoned is not None and poisoned[0] == rank:
        batches[poisoned[1]][0][0, 0] = float("inf")
    loops.train(parallel, optimizer, data=batches)
    return cases.state(parallel, optimizer)


@pytest.mark.parametrize(("level", "wrapper"), ALL)
def test_two_ranks_train_as_one_process_on_the_joined_batch(on_two_ranks, level, wrapper):
    first = cases.alike(on_two_ranks(train_rank, level, wrapper))
    cases.assert_trained_as_one(first, level, cases.net(), steps=20, eps=16)


def clip_the_model(rank, wrapper, max_norm=2.0**-4):
    """Clips the gradients of the model, twice as they are rebuilt into buckets."""
    parallel, optimizer = cases.wrapped("O5", rank, wrapper)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        cases.backward(parallel, optimizer, *cases.rank_batch(rank, step))
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), max_norm)
        grads = [param.grad for param in amp.master_params(optimizer)]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        optimizer.step()
    return norms, cases.state(parallel, optimizer)


@pytest.mark.parametrize("wrapper", cases.WRAPPERS)
def test_clipping_the_model_clips_the_masters_alike_on_all_ranks(on_two_ranks, wrapper):
    first = cases.alike(on_two_ranks(clip_the_model, wrapper))
    torch.testing.assert_close(first[0], [2.0**-4] * 3, rtol=0.02, atol=0.0)


@pytest.mark.parametrize(("level", "wrapper"), [("O1", "apex"), *ALL[-4:]])
def test_an_inf_in_one_rank_skips_and_halves_on_all(on_two_ranks, level, wrapper):
    clean = on_two_ranks(train_rank, level, wrapper, 2)[0]
    first = cases.alike(on_two_ranks(train_rank, level, wrapper, 3, (1, 2)))
    assert first["masters"] == clean["masters"]
    assert first["scales"]["loss_scaler0"] == {"loss_scale": cases.START_SCALE / 2, "unskipped": 0}


# -- accumulation under no_sync --------------------------------------------------------------


def accumulate(level, wrap, seed, batch_at, delay):
    """Three updates of three passes each; only the last pass of an update communicates."""
    model, optimizer = cases.prepare(level, seed)
    parallel = wrap(model)
    for step in range(9):
        last = step % 3 == 2
        with cases.local(parallel, not last):
            delays = delay and not last
            cases.backward(parallel, optimizer, *batch_at(step), 1 / 3, delay_unscale=delays)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(("level", "wrapper"), [case for case in ALL if "static" not in case[1]])
def test_gradients_accumulated_without_sync_are_sent_with_the_last(
    on_two_ranks, level, wrapper, delay
):
    cases.assert_runs_as_one(on_two_ranks, accumulate, level, wrapper, delay, eps=8)


@loops.every(level=loops.MIXED, wrapper=cases.OTHER_FORWARDS)
def test_a_wrapper_may_run_the_model_in_another_way_than_its_forward(on_two_ranks, level, wrapper):
    cases.assert_runs_as_one(on_two_ranks, accumulate, level, wrapper, False, eps=8)


def sum_of_many(rank, level, wrapper, kind):
    """Passes of one rank alone, which add ones to a large gradient, before one that is sent."""
    model, optimizer = cases.initialized(level, loops.Weights(), loss_scale=1.0)
    parallel = cases.WRAPPERS[wrapper](model)
    large = 2.0 / cases.EPS[level]
    factors = [large, *[1.0] * 42, 2.0]
    for index, factor in enumerate(factors):
        last = index == len(factors) - 1
        with contextlib.nullcontext() if last else parallel.no_sync():
            loss = parallel(a=factor, b=factor)
            if kind == "plain":
                loss.backward()
            else:
                delays = kind == "delayed" and not last
                loops.scaled_backward(loss, optimizer, delay_unscale=delays)
    return [master.grad[0].item() - large for master in amp.master_params(optimizer)]


@loops.every(kind=["block", "delayed", "plain"], wrapper=["torch", "torch views", "apex delayed"])
@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_many_passes_of_one_rank_add_up_in_fp32(on_two_ranks, level, wrapper, kind):
    """In 16 bits, the sum would stand still at its first element."""
    assert on_two_ranks(sum_of_many, level, wrapper, kind) == [[44.0, 44.0]] * 2


def places_of_gradients(rank):
    """Where the gradients of two blocks lie, of which the second adds to the first's."""
    parallel, optimizer = cases.wrapped("O1", rank, "torch views")
    places = []
    for step in range(4):
        if step == 2:  # the second forward has made other buckets
            optimizer.zero_grad()
        cases.backward(parallel, optimizer, *cases.rank_batch(rank, step))
        places.append([param.grad.data_ptr() for param in parallel.parameters()])
    return places[2:]


def test_gradients_that_are_views_of_buckets_take_no_memory_of_their_own(on_two_ranks):
    for first, second in on_two_ranks(places_of_gradients):
        assert second == first


def fail_in_a_pass(rank, level, local):
    """Gradients from before a pass that fails at its last node, and what the pass leaves."""
    parallel, optimizer = cases.wrapped(level, seed=0)
    with cases.local(parallel, local):
        for step in range(2):
            loss = loops.loss_of(parallel, *cases.rank_batch(rank, step))
            loss.backward() if local else loops.scaled_backward(loss, optimizer)
        earlier = loops.values(param.grad for param in parallel.parameters())
        x, y = cases.rank_batch(rank, 2)
        x.requires_grad_().register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cases.backward(parallel, optimizer, x, y)
        return earlier, loops.values(param.grad for param in parallel.parameters())


@loops.every(level=["O1", "O2", "O5"], local=[False, True])
def test_a_pass_that_fails_keeps_the_gradients_from_before(on_two_ranks, level, local):
    for earlier, left in on_two_ranks(fail_in_a_pass, level, local):
        assert all(grad.dtype is torch.float32 for grad in left)
        if level != "O5":  # without a scale, what autograd has added stays
            assert loops.same(left, earlier)


def gradient_in_a_block(rank):
    """Whether a batch norm's earlier gradient is there inside an O5 block, and after it."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
    model, optimizer = cases.initialized("O5", net)
    parallel = DistributedDataParallel(model)
    weight = model[1].weight
    found = []
    for _ in range(2):
        with amp.scale_loss(parallel(torch.randn(3, 2)).sum(), optimizer) as scaled_loss:
            found.append(weight.grad)
            scaled_loss.backward()
    return weight.dtype, found[1] is weight.grad


def test_without_a_scale_an_fp32_gradient_stays_where_it_is(on_two_ranks):
    assert on_two_ranks(gradient_in_a_block) == [(torch.float32, True)] * 2


def failing_block(loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        raise ZeroDivisionError


def fail_in_the_first_block(rank, level):
    parallel, optimizer = cases.wrapped(level, seed=0)
    loss = loops.loss_of(parallel, *cases.rank_batch(rank, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            failing_block(loss, optimizer)
    left = [param.grad for param in parallel.parameters()]
    return left if level == "O2" else [None]  # without a scale, they stay


@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_a_first_block_that_fails_is_not_taken_for_one_that_accumulates(on_two_ranks, level):
    for left in on_two_ranks(fail_in_the_first_block, level):
        assert set(left) == {None}


def checkpointed(self, x):
    return torch.utils.checkpoint.checkpoint(self.body, x.requires_grad_(), use_reentrant=True)


def accumulate_with_checkpoints(level, wrap, seed, batch_at):
    """A plain pass, a block under ``no_sync``, and a block that sends, for each update."""
    model = loops.Body(checkpointed, body=loops.net(seed))
    model, optimizer = cases.initialized(level, model, loss_scale=1.0)
    parallel = wrap(model)
    for step in range(6):
        with cases.local(parallel, step % 3 == 1):
            loss = loops.loss_of(parallel, *batch_at(step)) / 3
            if step % 3 == 0:
                loss.backward()
            else:
                loops.scaled_backward(loss, optimizer)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def test_passes_with_checkpoints_inside_are_sent_as_others(on_two_ranks):
    cases.assert_runs_as_one(on_two_ranks, accumulate_with_checkpoints, "O5", "torch", eps=8)


# -- exact masters ---------------------------------------------------------------------------


def train_in_groups(rank, level, first):
    """Each rank is a run of its own."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = cases.net(rank)
    parallel = DistributedDataParallel(model, process_group=groups[rank])
    model, optimizer = cases.initialized(level, model)
    if not first:
        parallel = DistributedDataParallel(model, process_group=groups[rank])
    return cases.train_on_data_of(0, parallel, optimizer, steps=2)["masters"]


@loops.every(first=[False, True], level=loops.WITH_MASTERS)
def test_a_wrapper_communicates_in_its_own_group(on_two_ranks, level, first):
    for rank, found in enumerate(on_two_ranks(train_in_groups, level, first)):
        model, optimizer = cases.prepare(level, seed=rank)
        assert found == cases.train_on_data_of(0, model, optimizer, steps=2)["masters"]


def train_after_a_rank_alone(rank, level, alone):
    """Rank 0 first tries its model out, on gradients that it clears."""
    model, optimizer = cases.prepare(level, seed=rank)
    parallel = DistributedDataParallel(model)
    if rank == 0:
        called = model if alone == "module" else parallel
        with parallel.no_sync():
            cases.backward(called, optimizer, *cases.rank_batch(0, 99))
        optimizer.zero_grad()
    return cases.train_on_data_of(rank, parallel, optimizer, steps=2)


@loops.every(alone=["module", "wrapper"], level=loops.WITH_MASTERS)
def test_masters_are_shared_after_a_pass_of_one_rank_alone(on_two_ranks, level, alone):
    first, second = on_two_ranks(train_after_a_rank_alone, level, alone)
    assert first["masters"] == second["masters"]
    assert first["model"] == second["model"]


@pytest.mark.parametrize("beside", [False, True])
def test_ranks_that_average_in_the_block_skip_together(on_two_ranks, level, beside):
    (skipped, first), (_, second) = on_two_ranks(average_inside, level, beside)
    assert first == second
    assert skipped == [False, True, False]
    model, optimizer = cases.prepare(level, seed=0)
    loops.train(model, optimizer, data=[cases.joined(0), cases.joined(2)])
    cases.assert_trained_alike(first, optimizer, level)


def accumulate_inside(level, wrap, seed, batch_at):
    """Without a wrapper: the last block of an update averages what all have left."""
    model, optimizer = cases.prepare(level, seed=0)
    for step in range(6):
        last = step % 2 == 1
        loss = loops.loss_of(model, *batch_at(step))
        with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
            scaled_loss.backward()
            for param in model.parameters() if last and dist.is_initialized() else ():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def test_ranks_that_average_in_the_last_block_average_the_sum(on_two_ranks, level):
    cases.assert_runs_as_one(on_two_ranks, accumulate_inside, level, None)


def searches(rank):
    """How often three blocks before the first step walk through all objects of the process."""
    model, optimizer = cases.prepare("O4", seed=0)
    counts = []

    def count(frame, event, function):
        if event == "c_call" and function is gc.get_objects:
            counts[-1] += 1

    for _ in range(3):
        counts.append(0)
        block = amp.scale_loss(model(cases.rank_batch(rank, 0)[0]).sum(), optimizer)
        sys.setprofile(count)
        try:
            with block as scaled_loss:
                sys.setprofile(None)
                scaled_loss.backward()
        finally:
            sys.setprofile(None)
    return counts


def test_wrappers_are_searched_for_in_the_first_block_alone(on_two_ranks):
    assert on_two_ranks(searches) == [[1, 0, 0]] * 2
