"""Tools whose verdicts on one rank must not change what it exchanges with the others."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedLAMB
from tests.debug.bodies import Body
from tests.support import loops
from tests.support.features import averages_on_cpu, shards_on_cpu, unbinds_dtensors
from tests.support.sharding import mesh, net, shard

pytestmark = pytest.mark.distributed


def refused(rank):
    with pytest.raises(ValueError, match="in one of 2 processes"):
        amp.debug.suggest_fp32(nn.Linear(8, 1), torch.randn(16, 8))
    return True


def test_suggest_fp32_runs_in_one_process_alone(on_two_ranks):
    assert on_two_ranks(refused) == [True] * 2


OPTIMIZERS = {
    "FusedLAMB": lambda params: FusedLAMB(params, max_grad_norm=0.1),  # with a norm over ranks
    "AdamW": torch.optim.AdamW,
}


def frozen_with_nan_on_the_last_rank(rank, kind, level):
    model = shard(net(), mesh(2))
    optimizer = OPTIMIZERS[kind](model.parameters())
    options = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    x, y = loops.batch()
    found = []
    for spoiled in (True, False):
        loss = nn.functional.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            if spoiled and rank == 1:
                model[0].weight.grad.to_local()[0] = float("nan")
        with amp.debug.frozen_updates(optimizer) as updates:
            optimizer.step()
        optimizer.zero_grad()
        found.append((updates.wanted > 0, updates.frozen))
    return found


@shards_on_cpu
@pytest.mark.parametrize("level", ["O4"])
@pytest.mark.parametrize("kind", [pytest.param("FusedLAMB", marks=unbinds_dtensors), "AdamW"])
def test_a_skipped_step_of_a_sharded_model_freezes_nothing_on_any_rank(on_two_ranks, kind, level):
    expected = [(False, 0), (True, 0)]
    assert on_two_ranks(frozen_with_nan_on_the_last_rank, kind, level) == [expected] * 2


def recorded_norm(rank, world_size):
    model = net() if world_size == 1 else shard(net(), mesh(world_size))
    model, optimizer = loops.prepared("O4", model=model)
    with amp.debug.History(optimizer) as history:
        loops.backward(model, optimizer, *loops.batch())
    return history.passes[0].grad_norm


@shards_on_cpu
@averages_on_cpu
def test_a_recorded_norm_covers_all_shards(on_two_ranks):
    whole = recorded_norm(0, 1)
    assert on_two_ranks(recorded_norm, 2) == pytest.approx([whole] * 2, rel=1e-2)


@torch.library.custom_op("apex_tests::from_next", mutates_args=())
def from_next(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.distributed.all_to_all_single(out, x.flip(0).contiguous())
    return out


from_next.register_autograd(lambda ctx, grad: grad)


def traced_through_an_operator_that_communicates(rank):
    """The first rank receives inf; only the second loses digits."""
    shift = Body(lambda self, x: (x + 1000.0 * rank) - 1000.0 * rank)
    exchange = Body(lambda self, x: from_next(x))
    model = nn.Sequential(nn.Linear(4, 4), shift, exchange, nn.Linear(4, 1))
    model.bfloat16()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with amp.debug.trace_rounding(model) as rounding:
        model(x).float().sum().backward()
    with amp.debug.trace_overflow(model) as overflow:
        model(x * (float("inf") if rank else 1.0)).float().sum().backward()
    torch.distributed.all_reduce(total := torch.ones(1))
    worst = rounding.worst
    return worst and worst.module, overflow.first is not None, total.tolist()


def test_a_library_s_operator_that_communicates_runs_once(on_two_ranks):
    found = on_two_ranks(traced_through_an_operator_that_communicates)
    assert found == [(None, True, [2.0]), ("1", True, [2.0])]
