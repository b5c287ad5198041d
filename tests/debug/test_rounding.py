"""What a rounding trace reports, and that the run computes what it computes without the trace."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.contrib.optimizers import FusedAdam
from tests.debug import rounding_cases
from tests.debug.bodies import Body
from tests.debug.rounding_cases import MODES, Training, layer, sample, shift, traced
from tests.support.loops import every


def shifted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), layer(shift)).bfloat16()
    return traced(model, torch.randn(4, 8, dtype=torch.bfloat16))


@every(mode=MODES, name=["conv net", "transformer, -inf", "lstm", "refinement"])
def test_the_run_computes_the_same_bits_as_without_the_trace(name, mode):
    """Weights, gradients, buffers, the optimizer's state, losses, and what is drawn next."""
    results = []
    for traces in (False, True) if rounding_cases.runs(name, mode) else ():
        torch.manual_seed(0)
        training = Training(rounding_cases.HEALTHY[name](), mode)
        model, state = training.model, training.optimizer.state
        with amp.debug.trace_rounding(model) if traces else nullcontext():
            losses = [training.step(*sample(model)) for _ in range(3)]
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        held = [*grads, *(v for each in state.values() for v in each.values())]
        results.append([*losses, *model.parameters(), *model.buffers(), *held, torch.rand(3)])
    assert all(map(torch.equal, *results)) if results else True


def test_the_report_names_place_cause_and_remedy():
    trace = shifted()
    lines = str(trace).splitlines()
    assert lines[0].startswith("Digits first lost: aten.sub in 1, forward, in bfloat16: error 1, ")
    assert "rounding_cases.py:" in lines[1]
    assert lines[3].startswith("  cause  cancellation: right for")
    data = json.loads(trace.to_json(), parse_constant=pytest.fail)
    assert data["worst"]["error"] == trace.worst.error
    assert len(data["lost"]) == len(trace.lost)


def test_what_loses_digits_later_is_listed_in_order():
    linear, shifts = nn.Linear(8, 8).bfloat16(), nn.Sequential(layer(shift), layer(shift))
    with amp.debug.trace_rounding(shifts) as trace:
        for part in shifts:
            part(linear(torch.randn(4, 8, dtype=torch.bfloat16)))
    assert [row.module for row in trace.lost] == ["0", "1"]
    assert str(trace).splitlines()[-1] == "later  aten.sub in 1, forward"


# -- what an operator needs ----------------------------------------------------------------------


def test_dropout_and_noise_draw_once_for_both_sides():
    def noise(self, x):
        x = nn.functional.dropout(x, 0.5) + torch.randn_like(x)
        return x * torch.bernoulli(torch.full_like(x, 0.5))

    for kind in (Body(noise), nn.Dropout(0.3), nn.RReLU(), nn.AlphaDropout(0.3)):
        model = nn.Sequential(nn.Linear(16, 16), kind, nn.Linear(16, 4)).bfloat16()
        trace = traced(model, torch.randn(64, 16, dtype=torch.bfloat16))
        assert trace.worst is None, str(trace)


def test_decisions_are_those_of_the_run():
    def decide(self, x):
        return x.sort(-1).values + x.round() + x.sign() + x.relu() + x.clamp(0, 0.1).abs()

    model = nn.Sequential(nn.Linear(16, 16), Body(decide), nn.Linear(16, 4)).bfloat16()
    assert traced(model, torch.randn(64, 16, dtype=torch.bfloat16)).worst is None


def in_a_slice(x):
    y = x.clone()
    y[:, ::2] += 1000
    y[:, 1::2] += 1000
    return y


def in_a_view(x):
    y = x.clone()
    y.view(-1).add_(1000)
    return y


WRITES = {
    "view": in_a_view,
    "slice": in_a_slice,
    "copy": lambda x: torch.empty_like(x).copy_(x + 1000),
    "out": lambda x: torch.add(x.detach(), 1000, out=torch.empty_like(x)),
    "foreach": lambda x: torch._foreach_add([x, x], 1000)[0],
    "itself": lambda x: x + (lambda y: y.mul_(y))(x.detach() + 32),
    "conjugate": lambda x: (torch.complex(x.float(), -(x + 1000).float()).conj() * -1j).real,
    "negative": lambda x: torch.complex(x.float(), -(x + 1000).float()).conj().imag,
}


@pytest.mark.parametrize("how", WRITES)
def test_writes_in_place_and_views_are_followed(how):
    body = Body(lambda self, x: WRITES[how](x) - 1000 + x)
    model = nn.Sequential(nn.Linear(16, 16), body).bfloat16()
    worst = traced(model, torch.randn(8, 16, dtype=torch.bfloat16)).worst
    assert (worst.module, worst.op) == ("1", "aten.sub")


def test_checkpoints_and_models_of_one_name_are_followed():
    def block(self, x):
        return checkpoint(lambda y: self.shift(self.linear(y)), x, use_reentrant=False)

    one = nn.Linear(8, 8).bfloat16()
    two = Body(block, linear=nn.Linear(8, 8), shift=layer(shift)).bfloat16()
    with amp.debug.trace_rounding(one, two) as trace:
        two(one(torch.randn(4, 8, dtype=torch.bfloat16))).sum().backward()
    assert trace.worst.module == "Body:shift"


# -- no verdict ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def low_only():
    """An operator whose kernel accepts bf16 alone."""

    @torch.library.custom_op("apex_tests::low_only", mutates_args=())
    def low_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16:
            raise RuntimeError("low_only takes bfloat16")
        return x * 1.0

    low_only.register_autograd(lambda ctx, grad: grad)
    return low_only


def test_an_operator_that_does_not_run_in_fp32_is_named_and_accuses_none(low_only):
    body = Body(lambda self, x: low_only(x + 1000) - 1000)
    model = nn.Sequential(nn.Linear(8, 8), body).bfloat16()
    trace = traced(model, torch.randn(4, 8, dtype=torch.bfloat16))
    assert trace.worst is None
    (skipped,) = trace.skipped
    assert skipped.module == "1"
    assert skipped.op == "apex_tests.low_only"
    assert "low_only takes bfloat16" in skipped.reason
    assert "skipped: apex_tests.low_only in 1: it does not run in fp32" in str(trace)


def test_a_trace_that_saw_nothing_in_16_bits_gives_no_verdict():
    model = nn.Linear(4, 4)
    with amp.debug.trace_rounding(model) as trace:
        pass
    assert str(trace).startswith("Nothing traced: no operator ran inside.")
    trace = traced(model, torch.ones(2, 4))
    assert str(trace).startswith("Nothing to judge: none of ")


def test_a_step_may_get_its_gradients_as_arguments():
    model = nn.Linear(4, 1).bfloat16()
    masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = FusedAdam(masters)
    with amp.debug.trace_rounding(model) as trace:
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(grads=[param.grad for param in model.parameters()])
    assert "No step found a gradient" not in str(trace)


def test_what_an_overflow_leaves_of_a_gradient_is_not_judged():
    """The smallest element is left, of which more digits are lost than of the others."""
    x = torch.tensor([1.001, 10.0, 20.0, 30.0]).half().requires_grad_()
    with amp.debug.trace_rounding() as found:
        ((x * 1.0003 - 1.0).float().square() * 1e5).sum().backward()
    assert x.grad.isfinite().tolist() == [True, False, False, False]
    assert not found.lost


def test_amp_s_own_checks_are_no_operators_of_a_model():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("positions", torch.arange(1000.0))
    with amp.debug.trace_rounding(model) as found:
        amp.initialize(model, opt_level="O5", verbosity=0)
        model(torch.ones(2, 4))
    assert not found.lost


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_that_are_all_0_are_told_before_any_step(dtype):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).to(dtype)
    nn.init.constant_(model[0].bias, -100.0)
    trace = traced(model, torch.ones(2, 2, dtype=dtype))
    assert "a gradient" not in str(trace)  # the last layer has one
    trace = traced(model[:2], torch.ones(2, 2, dtype=dtype))
    assert str(trace).startswith("No weight got a gradient: aten.threshold_backward in 1 returned")
    assert ("Numbers below 3e-8 are 0 there" in str(trace)) is (dtype is torch.float16)
