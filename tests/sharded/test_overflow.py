"""What overflows on one rank is skipped on all, and their scales stay equal."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from apex import amp
from tests.sharded.cases import mesh, net, prepared, shard, sharded, whole, wholes
from tests.support.features import shards_on_cpu
from tests.training.cases import MIXED, backward, batch, loss_of, sgd

pytestmark = shards_on_cpu


def local_values(model):
    return [param.detach().to_local().clone() for param in model.parameters()]


def steps_after(rank, spoil, world_size):
    """For each level: whether a step that ``spoil`` overflows on the last rank moved anything."""
    found = {}
    for level in MIXED:
        model, optimizer = sharded(level, world_size)
        before = local_values(model)
        spoil(model, optimizer, last=rank == world_size - 1)
        optimizer.step()
        after = local_values(model)
        moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        optimizer.zero_grad()
        backward(model, optimizer, *batch(seed=2))
        optimizer.step()
        scale = amp._amp_state.loss_scalers[-1].loss_scale()
        found[level] = moved, scale, [bool(w.isfinite().all()) for w in wholes(model.parameters())]
    return found


def in_the_data(model, optimizer, *, last):
    x, y = batch()
    if last:
        x[0, 0] = float("inf")
    backward(model, optimizer, x, y)


def in_one_shard(model, optimizer, *, last):
    """The gradient of the first bias row that the rank holds, after the exchange."""
    loss = loss_of(model, *batch())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        if last:
            model[0].bias.grad.to_local()[0] = float("nan")


def test_inf_in_the_data_of_one_rank_skips_on_all(on_two_ranks):
    for found in on_two_ranks(steps_after, in_the_data, 2):
        assert found == dict.fromkeys(MIXED, (False, 2.0**11, [True] * 4))


def test_nan_in_a_shard_that_one_rank_holds_skips_on_all(on_two_ranks):
    for found in on_two_ranks(steps_after, in_one_shard, 2):
        assert found == dict.fromkeys(MIXED, (False, 2.0**11, [True] * 4))


def test_nan_in_a_shard_skips_on_ranks_that_hold_nothing_of_another_parameter(on_four_ranks):
    for found in on_four_ranks(steps_after, in_one_shard, 4):
        assert found == dict.fromkeys(MIXED, (False, 2.0**11, [True] * 4))


def changed_between_passes(rank):
    """Whether a step moved anything, and was skipped: NaN in one shard, then a change of all."""
    model, optimizer = sharded("O5", 2, loss_scale="dynamic")
    before = local_values(model)
    in_one_shard(model, optimizer, last=rank == 1)
    for param in amp.master_params(optimizer):
        param.grad.mul_(0.5)
    backward(model, optimizer, *batch(seed=2))
    optimizer.step()
    after = local_values(model)
    moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return moved, amp.step_was_skipped(optimizer)


def test_an_overflow_in_one_shard_outlasts_a_change_of_all_gradients(on_two_ranks):
    assert on_two_ranks(changed_between_passes) == [(False, True)] * 2


class Scaled(nn.Module):
    """A net with a parameter that stays whole on every rank."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.net(x) * self.gain


def plain_beside_sharded(rank, level):
    model = Scaled()
    shard(model.net, mesh(2))
    model, optimizer = prepared(level, model, sgd)  # torch's fused kernels take one kind a group
    before = whole(model.gain), wholes(model.net.parameters())
    loss = loss_of(model, *batch())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        if rank == 1:
            model.gain.grad[0] = float("inf")
    optimizer.step()
    after = whole(model.gain), wholes(model.net.parameters())
    return torch.equal(before[0], after[0]), [*map(torch.equal, before[1], after[1])]


def test_inf_in_a_plain_parameter_of_one_rank_skips_on_all(on_two_ranks):
    for found in on_two_ranks(plain_beside_sharded, "O5"):
        assert found == (True, [True] * 4)


def messages(rank, level, options):
    """What the end of a pass sends, over a plane with parameters of two dtypes."""
    plane = mesh(2, 2, names=("replica", "shard"))
    model = shard(nn.Sequential(*net(), nn.LayerNorm(2)), plane)
    model, optimizer = prepared(level, model, **options)
    with contextlib.ExitStack() as block:
        block.enter_context(amp.scale_loss(loss_of(model, *batch()), optimizer)).backward()
        with CommDebugMode() as sent:
            block.close()
    return {str(op): count for op, count in sent.get_comm_counts().items()}


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_pass_sends_one_flag_over_the_sharded_dimension(level, on_four_ranks):
    options = {} if level == "O4" else {"fp32_modules": [nn.LayerNorm]}
    assert on_four_ranks(messages, level, options) == [{"c10d.allreduce_": 1}] * 4


def test_a_pass_with_a_static_scale_sends_nothing(on_four_ranks):
    assert on_four_ranks(messages, "O5", {"loss_scale": 128.0}) == [{}] * 4
