"""NVIDIA's BERT with ``--allreduce_post_accumulation``, distilled: the script averages gradients.

It is on no registry. Its loop accumulates with ``delay_overflow_check``, sends one flat tensor
through ``amp_C`` and ``apex_C``, puts its own flag into the loss scaler and asks that to update.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import amp_C
import apex_C
from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedLAMB
from apex.parallel.distributed import flat_dist_call
from tests.distributed.cases import EPS, net, rank_batch, state
from tests.support.loops import every, scaled_backward

pytestmark = pytest.mark.distributed

ACCUMULATED = 2
SCALE = 2**8
POISONED = 1  # the step in which rank 1 meets an infinite loss


class WarmUp(torch.optim.lr_scheduler.LRScheduler):
    """Reads the step from FusedLAMB's groups, so that a skipped step does not count."""

    def step(self, epoch=None):
        self.last_epoch = self.optimizer.param_groups[0].get("step", 0) + 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.last_epoch)


def rate(step):
    return 0.01 * step


def fused_lamb(model):
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = FusedLAMB(groups, lr=rate(1))
    return optimizer, WarmUp(optimizer)


def prepare(rank, level):
    model = net(seed=rank)
    optimizer, scheduler = fused_lamb(model)
    low = {"O1": None, "O2": torch.float16, "O5": torch.bfloat16}[level]
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", cast_model_outputs=low, verbosity=0
    )
    _amp_state.loss_scalers[0]._loss_scale = SCALE
    flat_dist_call([param.data for param in model.parameters()], dist.broadcast, (0,))
    return model, optimizer, scheduler


def take_step(model, optimizer, flag, dtype, put_back):
    """Averages over ranks and micro-batches, updates the scale, steps or skips."""
    scaler = _amp_state.loss_scalers[0]
    loss_scale = scaler.loss_scale()
    grads = [param.grad for param in amp.master_params(optimizer) if param.grad is not None]
    sent = torch.empty(sum(grad.numel() for grad in grads), dtype=dtype)
    parts = apex_C.unflatten(sent, grads)
    flag.zero_()
    share = loss_scale / (dist.get_world_size() * ACCUMULATED)
    amp_C.multi_tensor_scale(65536, flag, [grads, parts], share)
    dist.all_reduce(sent)
    flag.zero_()
    amp_C.multi_tensor_scale(65536, flag, [parts, grads], 1.0 / loss_scale)
    before = scaler._overflow_buf
    scaler._overflow_buf = flag
    skip = scaler.update_scale()
    setattr(scaler, put_back, before)
    if not skip:
        optimizer.step()
    elif _amp_state.opt_properties.master_weights:
        for param in optimizer._amp_stash.all_fp32_from_fp16_params:
            param.grad = None
    for param in model.parameters():
        param.grad = None
    return skip


def micro_batch(rank, step, part):
    return rank_batch(rank, ACCUMULATED * step + part)


def train_rank(rank, level, dtype, put_back):
    model, optimizer, scheduler = prepare(rank, level)
    flag = torch.zeros(1, dtype=torch.int32)
    skips = []
    for step in range(4):
        for part in range(ACCUMULATED):
            x, y = micro_batch(rank, step, part)
            loss = F.mse_loss(model(x).float(), y)
            if (rank, step, part) == (1, POISONED, 0):
                loss = loss * torch.inf
            scaled_backward(loss, optimizer, delay_overflow_check=True)
        scheduler.step()
        skips.append(bool(take_step(model, optimizer, flag, dtype, put_back)))
    return state(model, optimizer), skips


def in_fp32():
    """Returns what one process reaches on all micro-batches, without the poisoned step."""
    model = net(seed=0)
    optimizer, scheduler = fused_lamb(model)
    for step in (0, 2, 3):
        optimizer.zero_grad()
        scheduler.step()
        for rank in (0, 1):
            for part in range(ACCUMULATED):
                x, y = micro_batch(rank, step, part)
                (F.mse_loss(model(x), y) / (2 * ACCUMULATED)).backward()
        optimizer.step()
    return [param.detach() for param in amp.master_params(optimizer)]


# The script means to put the scaler's own flag back, and misspells its name; its descendants do so.
@every(put_back=["_overfloat_buf", "_overflow_buf"], dtype=[torch.float32, torch.float16])
def test_gradients_averaged_later_train_and_skip_alike(on_two_ranks, level, dtype, put_back):
    (first, skips), (second, others) = on_two_ranks(train_rank, level, dtype, put_back)
    assert skips == others == [step == POISONED for step in range(4)]
    assert first == second
    assert first["scales"] == {"loss_scaler0": {"loss_scale": SCALE / 2, "unskipped": 2}}
    for ours, expected in zip(first["masters"], in_fp32(), strict=True):
        torch.testing.assert_close(torch.tensor(ours), expected, rtol=EPS[level], atol=EPS[level])
