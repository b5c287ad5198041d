"""One pass: the scaled loss out, unscaled gradients in, the scale updated."""

import contextlib
import math

import pytest
import torch

from apex._core.op_table import CastSpec, OpTable
from apex._core.scale import ScaleRule
from apex._engine.backward import BackwardPass
from apex._engine.optimizer.binding import Binding
from apex._engine.scaler import scaler_for
from apex._torch.ddp import Communication


class Block:
    """One fp32 parameter with its optimizer and scaler, and what was reported."""

    def __init__(self, loss_scale="dynamic"):
        self.param = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.param], lr=0.5)
        self.binding = Binding(self.optimizer, master_weights=False)
        self.scaler = scaler_for(loss_scale, ScaleRule())
        self.reported = []

    def ended(self, updates, failed):
        if not failed and self.scaler.dynamic:
            self.reported.append(updates)

    def open(self, factor=1.0, **options):
        return BackwardPass(
            self.param.sum() * factor,
            [self.binding],
            self.scaler,
            communication=lambda binding: Communication(),
            ended=self.ended,
            **options,
        )

    def run(self, factor=1.0, **options):
        with self.open(factor, **options) as scaled_loss:
            scaled_loss.backward()
        return self.param.grad


@pytest.mark.parametrize("loss_scale", ["dynamic", 1.0, 8.0])
def test_gradients_are_true_after_the_block(loss_scale):
    assert torch.equal(Block(loss_scale).run(factor=3.0), torch.full((2,), 3.0))


@pytest.mark.parametrize(("loss_scale", "factor"), [("dynamic", 2.0**16), (1.0, 1.0), (8.0, 8.0)])
def test_the_loss_is_scaled_inside(loss_scale, factor):
    block = Block(loss_scale)
    with block.open() as scaled_loss:
        assert scaled_loss == 2 * factor


def test_each_pass_is_reported_once():
    block = Block()
    block.run()
    block.run(math.inf)
    updates = [update for (update,) in block.reported]
    assert [(update.overflow, update.loss_scale) for update in updates] == [
        (False, 2.0**16),
        (True, 2.0**15),
    ]


def test_finishing_twice_unscales_once():
    block = Block()
    with block.open() as scaled_loss:
        scaled_loss.backward()
        block.binding.gradients.open_pass.finish()
    assert torch.equal(block.param.grad, torch.ones(2))
    assert len(block.reported) == 1


def test_a_delayed_pass_reports_nothing_and_stays_open():
    block = Block(8.0)
    grad = block.run(delay_unscale=True)
    assert torch.equal(grad, torch.full((2,), 8.0))
    assert block.binding.gradients.open_pass is not None
    assert block.reported == []


def test_a_pass_without_overflow_check_unscales_and_leaves_the_scale():
    block = Block()
    block.run(math.inf, delay_overflow_check=True)
    assert block.reported == []
    assert block.scaler.read_scale() == 2.0**16
    assert block.binding.gradients.overflow.found_inf == 1.0


def test_after_an_exception_nothing_is_open_or_reported():
    block = Block()
    with pytest.raises(KeyError), block.open():
        raise KeyError
    assert block.binding.gradients.open_pass is None
    assert not block.scaler.open_blocks
    assert block.reported == []


@pytest.mark.parametrize("fails", [True, False])
def test_the_casts_of_passes_are_the_block_s_until_it_ends(fails):
    casts = CastSpec(torch.bfloat16, ("cpu",), OpTable.default())
    inside = []
    with contextlib.suppress(KeyError), Block().open(casts=casts):
        inside.append(torch._C._len_torch_function_stack())
        if fails:
            raise KeyError
    assert inside == [1]
    assert torch._C._len_torch_function_stack() == 0
