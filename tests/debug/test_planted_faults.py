"""Programs with one planted overflow each: the trace names the operator, its place and why."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex.debug.overflow import trace_overflow
from tests.debug.bodies import Body
from tests.support.loops import InBackward, prepared, scaled_backward

FP16 = torch.float16
INF, NAN = float("inf"), float("nan")


def body_net(body):
    """The module under test, ``1``, behind a linear layer."""
    return nn.Sequential(nn.Linear(3, 3), body)


def through_net(function):
    """Returns the trace of one plain iteration in fp32 of a net with ``function`` in the middle."""
    net = body_net(Body(function))
    nn.init.eye_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    with trace_overflow(net) as trace:
        net(torch.ones(2, 3)).sum().backward()
    return trace


CASES = {}
"""Programs by name, and what the first fault of each is to be."""


def planted(op, kind, cause, module="1", direction="forward", dtype="float32"):
    def add(run):
        expected = f"aten.{op}", kind, cause, module, direction, dtype
        CASES[run.__name__] = run, expected
        return run

    return add


def infinity(grad):
    return torch.full_like(grad, INF)


# By operator, kind and cause of the fault, and its direction and dtype if not forward in float32.
FORMULAS = {
    "sum, inf, range, forward, float16": lambda self, x: (x * 4e4).half().sum(-1).float(),
    "prod, inf, range": lambda self, x: (x * 1e30).prod(-1),
    "pow, inf, range": lambda self, x: 10.0 ** (x * 1000),
    "log, inf, domain": lambda self, x: (x - x.detach()).log(),
    "div, inf, derivative, backward, float32": lambda self, x: (x - x.detach()).sqrt(),
    "acos, nan, domain": lambda self, x: (x * 1.5).acos(),
    "div, inf, division by zero": lambda self, x: x / (x - x.detach()),
    "mul, inf, constant": lambda self, x: x * INF,
    "_softmax, nan, constant": lambda self, x: x.masked_fill(x > 0, -INF).softmax(-1),
    "full_like, inf, constant, backward, float32": lambda self, x: InBackward.apply(x, infinity),
}
for name, formula in FORMULAS.items():
    op, kind, cause, *rest = name.split(", ")
    fault = f"aten.{op}", kind, cause, "1", *(rest or ("forward", "float32"))
    CASES[name] = functools.partial(through_net, formula), fault


@planted("add_", "inf", "range", direction="backward", dtype="float16")
def accumulation_of_fp16_gradients():
    w = nn.Parameter(torch.ones(3, dtype=FP16))
    net = body_net(Body(lambda self, x: x * self.w.float(), w=w))
    with trace_overflow(net) as trace:
        for _ in range(3):
            (net[1](torch.ones(1, 3)) * 3e4).sum().backward()
    return trace


@planted("div", "nan", "division by zero", module="0", direction="backward")
def hook_that_normalizes_a_zero_gradient():
    def watched(self, x):
        x.register_hook(lambda grad: grad / grad.norm())
        return x * 0

    return through_net(watched)


@planted("nll_loss_forward", "nan", "division by zero", module="")
def cross_entropy_with_all_targets_ignored():
    net = body_net(nn.Identity())
    with trace_overflow(net) as trace:
        F.cross_entropy(net(torch.ones(2, 3)), torch.tensor([-100, -100])).backward()
    return trace


@planted("log", "inf", "domain", module="")
def loss_in_a_closure():
    net = body_net(nn.Identity())
    optimizer = torch.optim.LBFGS(net.parameters())
    with trace_overflow(net) as trace:

        def closure():
            loss = (net(torch.ones(2, 3)) * 0).log().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return trace


@planted("_foreach_copy_", "inf", "update", module="", dtype="float16")
def masters_that_outgrow_the_model_s_fp16():
    net = body_net(nn.Identity())
    net, optimizer = prepared("O2", lambda p: torch.optim.SGD(p, lr=1e6), net, loss_scale=1.0)
    with trace_overflow(net) as trace:
        scaled_backward(net(torch.ones(2, 3)).sum(), optimizer)
        optimizer.step()
    return trace


@planted("native_batch_norm", "inf", "range", dtype="float16")
def a_batch_norm_whose_output_overflows():
    norm = nn.BatchNorm1d(3).half().eval()
    norm.running_var.zero_()
    net = nn.Sequential(nn.Identity(), norm)
    with trace_overflow(net) as trace:
        net(torch.full((2, 3), 500.0, dtype=FP16, requires_grad=True)).sum().backward()
    assert "running variance" not in str(trace)
    return trace


@planted("lerp_", "nan", "optimizer state", module="")
def nan_in_optimizer_state():
    net = body_net(nn.Identity())
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.state[net[0].weight]["exp_avg"][0, 0] = NAN
    with trace_overflow(net) as trace:
        optimizer.step()
    return trace


@planted("linalg_vector_norm", "inf", "update", module="")
def an_optimizer_whose_eps_is_a_pair():
    net = body_net(nn.Identity())
    optimizer = torch.optim.Adafactor(net.parameters())
    with trace_overflow(net) as trace:
        (net(torch.ones(2, 3)).sum() * 1e30).backward()
        optimizer.step()
    return trace


@pytest.mark.parametrize("name", CASES)
def test_the_first_fault_is_the_planted_one(name):
    run, expected = CASES[name]
    first = run().first
    found = first.op, first.kind, first.cause, first.module, first.direction, first.dtype
    assert found == expected
    assert first.location.rpartition(":")[0] == __file__
