"""Programs that use infinities and NaNs on purpose, and finish with finite gradients: no fault."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.debug.overflow import trace_overflow
from tests.support.loops import scaled_backward

INF, NAN = float("inf"), float("nan")
PROGRAMS = {}


def harmless(run):
    PROGRAMS[run.__name__] = run
    return run


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def x():
    return torch.randn(4, 4)


def triangle():
    return torch.full((4, 4), -INF).triu(1)


# From outside of the trace.
MASK = triangle()


@harmless
def causal_mask_that_is_filled_in(h):
    return h.masked_fill(torch.ones(4, 4).tril() == 0, -INF).softmax(-1)


@harmless
def mask_in_a_tensor_that_came_from_outside(h, mask=MASK):
    return (h + mask).softmax(-1)


@harmless
def mask_beyond_the_range_of_fp16(h):
    mask = (torch.ones(4, 4).tril() == 0) * -1e9
    return (h.half() + mask.half()).softmax(-1).float()


@harmless
def masked_rows_that_are_mended(h):
    scores = h.masked_fill(torch.tensor([True, False, False, False])[:, None], -INF)
    return scores.softmax(-1).nan_to_num(0.0)


@harmless
def log_softmax_of_masked_classes(h):
    logits = h.masked_fill(torch.tensor([False, False, False, True]), -INF)
    return F.nll_loss(logits.log_softmax(-1), torch.tensor([0, 1, 2, 0]))


@harmless
def fused_attention_with_a_mask(h):
    q = h[None, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=triangle())


@harmless
def ctc_loss(h):
    log_probs = h.log_softmax(-1)[:, None]
    lengths = torch.tensor([4]), torch.tensor([2])
    return F.ctc_loss(log_probs, torch.tensor([[1, 2]]), *lengths)


@harmless
def norm_of_zero(h):
    return (h * 0).norm(dim=-1) + h.sum()


@harmless
def memory_that_is_written_before_it_is_read(h):
    memory = torch.empty(4, 4)
    memory.fill_(NAN)
    out = torch.empty_like(memory)
    out.copy_(memory)
    out[:2] = h[:2]
    out[2:] = h[2:]
    return out


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_harmless_program_has_no_fault(name):
    net = Net(PROGRAMS[name])
    with trace_overflow(net) as trace:
        net(x()).sum().backward()
    assert trace.first is None, str(trace)
    assert trace.gradients == []


def test_a_mask_that_the_forward_writes_into_a_buffer_is_no_fault():
    def masked(h):
        net.mask.copy_(torch.ones(4, 4).tril().log())
        return (h + net.mask).softmax(-1)

    net = Net(masked)
    net.register_buffer("mask", torch.zeros(4, 4))
    with trace_overflow(net) as trace:
        net(x()).square().sum().backward()
    assert trace.first is None, str(trace)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_clean_step_of_every_level_has_no_fault(level):
    net = Net(causal_mask_that_is_filled_in)
    net, optimizer = amp.initialize(
        net,
        torch.optim.Adam(net.parameters(), fused=True),
        opt_level=level,
        verbosity=0,
        **({"loss_scale": 128.0} if level in ("O1", "O2") else {}),
    )
    with trace_overflow(net) as trace:
        for _ in range(2):
            optimizer.zero_grad()
            loss = net(x()).float().square().mean()
            scaled_backward(loss, optimizer)
            optimizer.step()
    assert trace.first is None, str(trace)
