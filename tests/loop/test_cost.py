"""What amp costs: host syncs per iteration, and stored bytes per parameter."""

import pytest
from torch import nn

from tests.support import loops
from tests.support.host_reads import calls_inside, reads_of, waits_are_errors

level = loops.at_levels(*loops.MIXED)

FUSED = ["fused AdamW", "fused SGD"]


@pytest.mark.parametrize("name", FUSED)
def test_an_iteration_with_a_fused_optimizer_has_no_host_read(level, name):
    for loss_scale in (None, "dynamic"):
        pair = loops.prepared(level, loops.OPTIMIZERS[name], loss_scale=loss_scale)
        assert reads_of(*pair, loops.train_step) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_an_iteration_with_a_fused_optimizer_never_waits_for_the_gpu(level, name):
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS[name], model=loops.net().cuda())
    data = [(x.cuda(), y.cuda()) for x, y in loops.batches(5)]
    for x, y in data[:2]:
        loops.train_step(model, optimizer, x, y)
    with waits_are_errors():
        for x, y in data[2:]:
            loops.train_step(model, optimizer, x, y)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_an_iteration_with_any_other_optimizer_has_at_most_one_host_read_more(level, name):
    model = loops.net()
    own = reads_of(model, loops.OPTIMIZERS[name](model.parameters()), loops.plain_step)
    pair = loops.prepared(level, loops.OPTIMIZERS[name], loss_scale="dynamic")
    assert reads_of(*pair, loops.train_step, steps=3) <= own + 3


def test_a_loss_through_many_branches_is_scaled_in_a_moment(level):
    """A walk along each path of its graph would not end."""
    model, optimizer = loops.prepared(level)
    loss = model(loops.batch()[0]).float().mean()
    for _ in range(64):
        loss = (loss + loss) / 2
    loops.scaled_backward(loss, optimizer)


class CountedLayer(nn.Linear):
    """Counts the walks through its modules."""

    walks = 0

    def named_modules(self, *args, **kwargs):
        self.walks += 1
        return super().named_modules(*args, **kwargs)


def test_a_step_of_fp32_weights_that_amp_has_not_prepared_walks_through_no_model(level):
    model, _ = loops.prepared(level, model=nn.Sequential(CountedLayer(4, 2)))
    plain, optimizer = loops.plain_pair()
    loops.plain_step(plain, optimizer, *loops.batch())
    before = model[0].walks
    loops.plain_step(plain, optimizer, *loops.batch())
    assert model[0].walks == before


def test_an_iteration_costs_the_same_for_each_other_model(level):
    pairs = [loops.trained(level)]
    counts = []
    for _ in range(3):
        pairs += [loops.trained(level) for _ in range(20)]
        counts.append(calls_inside(loops.train_step, *pairs[0], *loops.batch()))
    assert counts[2] - counts[1] < 1.2 * (counts[1] - counts[0]) + 20
