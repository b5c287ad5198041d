"""A run on two ranks that goes on from its state dicts is the run that never stopped."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from tests.distributed.cases import backward, prepare, rank_batch
from tests.support import loops

pytestmark = pytest.mark.distributed


def step(model, optimizer, x, y, *, has_block):
    optimizer.zero_grad()
    backward(model, optimizer, x, y) if has_block else loops.loss_of(model, x, y).backward()
    if not isinstance(model, DistributedDataParallel):
        for param in amp.master_params(optimizer):
            dist.all_reduce(param.grad)
    optimizer.step()


def run(rank, level, wraps, has_block, saved=None):
    """Returns the state dicts after two steps, or after two more from ``saved``."""
    # Ranks start with the same weights without a wrapper, which a script then broadcasts itself.
    model, optimizer = prepare(level, seed=rank if wraps else 0)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        amp.load_state_dict(saved[2])
    parallel = DistributedDataParallel(model) if wraps else model
    for index in (0, 1) if saved is None else (2, 3):
        step(parallel, optimizer, *rank_batch(rank, index), has_block=has_block)
    if saved is None:
        state = loops.saved_and_loaded([part.state_dict() for part in (model, optimizer, amp)])
        for index in (2, 3):
            step(parallel, optimizer, *rank_batch(rank, index), has_block=has_block)
        return state, loops.masters(optimizer)
    return loops.masters(optimizer)


def resumed(rank, *config):
    """Whether the resumed run has the masters of the uninterrupted one, and these."""
    saved, expected = run(rank, *config)
    found = run(rank, *config, saved)
    return loops.same(found, expected), [master.tolist() for master in found]


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize(("level", "has_block"), [("O2", True), ("O5", True), ("O5", False)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(on_two_ranks, level, wraps, has_block):
    (first_same, first), (second_same, second) = on_two_ranks(resumed, level, wraps, has_block)
    assert (first_same, second_same) == (True, True)
    assert first == second


def one_weight(rank, level):
    """Two passes without a clear, clipped and discarded: the gradients after each."""
    weight = torch.nn.Linear(2, 1, bias=False)
    scale = None if level == "O5" else 8.0
    model, optimizer = loops.prepared(level, model=weight, loss_scale=scale)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    found = []
    for factor in (1.0, 2.0):
        loops.scaled_backward(parallel(torch.full((1, 2), factor)).sum(), optimizer)
        found.append(next(amp.master_params(optimizer)).grad[0, 0].item())
    optimizer.zero_grad()
    for clips in (True, False):
        loops.scaled_backward(parallel(torch.ones(1, 2)).sum(), optimizer)
        if clips:
            amp.clip_grad_norm_(optimizer, 1e-3)
            model.weight.grad = None
            optimizer.zero_grad()
    return [*found, next(amp.master_params(optimizer)).grad[0, 0].item()]


def test_gradients_outlive_the_bucket_that_they_are_views_of_and_no_clip_does(on_two_ranks, level):
    assert on_two_ranks(one_weight, level) == [[1.0, 3.0, 1.0]] * 2
