"""Programs that use infinities and NaNs on purpose, and finish with finite gradients: no fault."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex.debug.overflow import trace_overflow
from tests.debug.bodies import Body
from tests.support.host_reads import HostReads

INF, NAN = float("inf"), float("nan")


def net_of(function):
    return Body(lambda self, x: function(self.linear(x)), linear=nn.Linear(4, 4))


def triangle():
    return torch.full((4, 4), -INF).triu(1)


def causal(h):
    return h.masked_fill(torch.ones(4, 4).tril() == 0, -INF).softmax(-1)


def beyond_the_range_of_fp16(h):
    mask = (torch.ones(4, 4).tril() == 0) * -1e9
    return (h.half() + mask.half()).softmax(-1).float()


def masked_classes(h):
    logits = h.masked_fill(torch.tensor([False, False, False, True]), -INF)
    return F.nll_loss(logits.log_softmax(-1), torch.tensor([0, 1, 2, 0]))


def fused_attention(h):
    q = h[None, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=triangle())


def ctc_loss(h):
    lengths = torch.tensor([4]), torch.tensor([2])
    return F.ctc_loss(h.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), *lengths)


def written_memory(h):
    memory = torch.empty(4, 4)
    memory.fill_(NAN)
    out = torch.empty_like(memory)
    out.copy_(memory)
    out[:2] = h[:2]
    out[2:] = h[2:]
    return out


MASK = triangle()
"""From outside of the trace."""

FIRST = torch.tensor([True, False, False, False])[:, None]
PROGRAMS = {
    "causal mask that is filled in": causal,
    "mask that came from outside": lambda h: (h + MASK).softmax(-1),
    "mask beyond the range of fp16": beyond_the_range_of_fp16,
    "masked rows that are mended": lambda h: h.masked_fill(FIRST, -INF).softmax(-1).nan_to_num(0),
    "log_softmax of masked classes": masked_classes,
    "fused attention with a mask": fused_attention,
    "ctc loss": ctc_loss,
    "norm of zero": lambda h: (h * 0).norm(dim=-1) + h.sum(),
    "a clamped weight in fp32": lambda h: (h.detach() + 100.0).exp().clamp(max=9.0) + h,
    "ones like infinities": lambda h: h + torch.ones_like((h.detach() + 100.0).exp()),
    "memory that is written before it is read": written_memory,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_harmless_program_has_no_fault(name):
    net = net_of(PROGRAMS[name])
    with trace_overflow(net) as trace:
        net(torch.randn(4, 4)).sum().backward()
    assert trace.first is None, str(trace)
    assert trace.gradients == []


def test_infinities_that_a_kernel_saves_are_no_fault_where_no_backward_pass_follows():
    with trace_overflow() as trace:
        ctc_loss(torch.randn(4, 4))
    assert trace.first is None, str(trace)


def test_a_mask_that_the_forward_writes_into_a_buffer_is_no_fault():
    def masked(h):
        net.mask.copy_(torch.ones(4, 4).tril().log())
        return (h + net.mask).softmax(-1)

    net = net_of(masked)
    net.register_buffer("mask", torch.zeros(4, 4))
    with trace_overflow(net) as trace:
        net(torch.randn(4, 4)).square().sum().backward()
    assert trace.first is None, str(trace)


def test_a_mask_costs_no_reading_of_the_weights():
    counts = []
    for value in (-INF, -1e4):
        net = net_of(lambda h, value=value: h.masked_fill(torch.eye(4) > 0, value).softmax(-1))
        net.more = nn.ParameterList([torch.ones(2)] * 50)
        with HostReads() as reads, trace_overflow(net):
            net(torch.randn(4, 4)).sum().backward()
        counts.append(reads.count)
    assert counts[0] - counts[1] < 50


@torch.no_grad()
def test_a_mask_from_outside_is_no_fault_of_an_evaluation():
    with trace_overflow() as trace:
        (torch.ones(4, 4) + MASK).softmax(-1)
    assert trace.first is None
