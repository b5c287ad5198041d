"""Gradients that a script uses before they are unscaled are named, and right uses are not."""

import warnings

import pytest
import torch
from torch import nn

from apex import amp
from apex.debug.overflow import trace_overflow
from tests.support import loops

UNSCALED_FIRST = {
    "unscale_ first": lambda scaler, optimizer, grads: (
        scaler.unscale_(optimizer),
        nn.utils.clip_grad_norm_([p for p, _ in grads], 1.0),
        grads[0][1].norm().item(),
    ),
    "a check for inf": lambda scaler, optimizer, grads: [
        bool(torch.isfinite(grad).all()) or grad.isnan().any().item() for _, grad in grads
    ],
    "a mean over ranks": lambda scaler, optimizer, grads: [grad.div_(2) for _, grad in grads],
    "a sum": lambda scaler, optimizer, grads: [grad.add_(grad.clone()) for _, grad in grads],
    "signs": lambda scaler, optimizer, grads: [
        ((grad > 0) & (grad < torch.inf)).sum().item() for _, grad in grads
    ],
    "by the inverse scale": lambda scaler, optimizer, grads: [
        (grad / scaler.get_scale()).norm().item() for _, grad in grads
    ],
    "by that of a mean": lambda scaler, optimizer, grads: [
        (grad / (scaler.get_scale() * 6)).norm().item() for _, grad in grads
    ],
    "by a product in place": lambda scaler, optimizer, grads: [
        grad.mul_(1.0 / scaler.get_scale()).norm().item() for _, grad in grads
    ],
    "by the kernel of a scaler": lambda scaler, optimizer, grads: (
        torch._amp_foreach_non_finite_check_and_unscale_(
            [grad for _, grad in grads], torch.zeros(1), torch.tensor(1.0 / scaler.get_scale())
        ),
        grads[0][1].norm().item(),
    ),
    "an average of its own": lambda scaler, optimizer, grads: [
        torch.zeros(grad.shape) + grad for _, grad in grads
    ],
    "zeros, and a pass without a scale": lambda scaler, optimizer, grads: (
        optimizer.zero_grad(set_to_none=False),
        torch.stack([param.sum() for param, _ in grads]).sum().backward(),
        optimizer.step(),
    ),
    "zeros": lambda scaler, optimizer, grads: [grad.zero_() for _, grad in grads],
}


def step(use):
    """Runs one iteration, with something done to the gradients before the step."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with trace_overflow(net) as trace:
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.ones(2, 4)).float().mean()
        scaler.scale(loss / 2).backward()
        use(scaler, optimizer, [(p, p.grad) for p in net.parameters()])
        scaler.step(optimizer)
        scaler.update()
    return trace


@pytest.mark.parametrize("use", UNSCALED_FIRST)
def test_what_is_right_with_scaled_gradients_is_no_fault(use):
    trace = step(UNSCALED_FIRST[use])
    assert trace.first is None, str(trace)


WRONG = {
    "clip_grad_value_": lambda _, optimizer, grads: nn.utils.clip_grad_value_(
        [p for p, _ in grads], 0.1
    ),
    "clamp_": lambda _, optimizer, grads: grads[0][1].clamp_(-0.1, 0.1),
    "a clamp by the scale": lambda _, optimizer, grads: grads[0][1].clamp_(-1024.0, 1024.0),
    "a clamp into another": lambda _, optimizer, grads: grads[0][1].clamp(-0.1, 0.1),
    "noise": lambda _, optimizer, grads: grads[0][1].add_(torch.ones(2, 4)),
    "a clip by hand": lambda _, optimizer, grads: grads[0][1].mul_(1.0 / grads[0][1].norm()),
    "a log": lambda _, optimizer, grads: float(grads[0][1].abs().mean()),
    "a comparison": lambda _, optimizer, grads: bool(grads[0][1].norm() < 5.0),
    "a step": lambda _, optimizer, grads: optimizer.step(),
}


@pytest.mark.parametrize("use", WRONG)
def test_what_is_wrong_is_named_at_its_line(use):
    first = step(WRONG[use]).first
    assert (first.kind, first.cause) == ("scaled", "scaled gradients")
    assert first.location.startswith(__file__)
    assert "1024" in first.why
    assert ("scaler.step(optimizer)" if use == "a step" else "unscale_(optimizer)") in first.remedy


def test_a_mean_of_as_many_as_a_multiple_of_the_scale_unscales_nothing():
    net = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with trace_overflow(net) as trace:
        output = net(torch.ones(8, 4))
        output.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        scaler.scale(output.mean()).backward()
    assert trace.first.cause == "scaled gradients"


def test_a_clip_of_masters_inside_the_block_is_named():
    for level in ("O1", "O2"):
        net, optimizer = loops.prepared(level, model=nn.Linear(4, 2), loss_scale=128.0)
        with trace_overflow(net) as trace, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # amp warns of it, too
            with amp.scale_loss(net(torch.ones(2, 4)).mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        assert (trace.first.op, trace.first.cause) == ("aten._foreach_mul_", "scaled gradients")


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_grad_scaler_that_is_left_in_is_to_be_removed_where_bf16_needs_none(level):
    model, optimizer = loops.prepared(level, model=nn.Linear(4, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with trace_overflow(model) as trace:
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        optimizer.step()
    assert "remove the GradScaler" in trace.first.remedy


@pytest.mark.filterwarnings("ignore:scaled_loss.backward.. was called after the end")
@pytest.mark.parametrize("level", loops.DYNAMIC)
def test_a_backward_pass_behind_its_block_is_told_to_move_into_it(level):
    model, optimizer = loops.prepared(level)
    with trace_overflow(model) as trace:
        with amp.scale_loss(model(loops.batch()[0]).float().mean(), optimizer) as scaled_loss:
            pass
        scaled_loss.backward()
        optimizer.step()
    assert "call scaled_loss.backward() inside" in trace.first.remedy


def test_a_number_that_is_read_hides_no_fault_behind_it():
    net = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with trace_overflow(net) as trace:
        scaler.scale(net(torch.ones(2, 4)).mean()).backward()
        net.weight.grad.norm().item()
        (net(torch.ones(2, 4)) * 0).log().mean().backward()
    assert (trace.first.op, trace.first.cause) == ("aten.log", "domain")
