"""``amp.debug.frozen_updates``: weights that a step should have moved and did not."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.debug import frozen_updates
from tests.support.loops import prepared, scaled_backward

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, foreach=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


def weight_of(values, dtype, grad=1.0):
    weight = nn.Parameter(torch.tensor(values, dtype=dtype))
    weight.grad = torch.full_like(weight, grad)
    return weight


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_update_below_half_the_rounding_step_is_frozen(make, dtype):
    # The rounding step below 1 is 2**-9 (bf16) and 2**-12 (fp16); the update is 1e-3.
    still = 1.0 if dtype is torch.bfloat16 else 8.0
    optimizer = make([weight_of([still, 0.01], dtype)])
    with frozen_updates(optimizer) as updates:
        optimizer.step()
    assert (updates.frozen, updates.wanted, updates.share) == (1, 2, 0.5)


@pytest.mark.parametrize("grad", [torch.inf, torch.nan])
def test_a_weight_without_a_finite_update_does_not_count(grad):
    optimizer = torch.optim.SGD([weight_of([1.0], torch.bfloat16, grad)], lr=1e-3)
    with frozen_updates(optimizer) as updates:
        optimizer.step()
    assert updates.wanted == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [False, True], ids=["", "overflow"])
def test_a_grad_scaler_may_step_inside(fused, bad):
    weight = nn.Parameter(torch.tensor([1.0, 0.01]))
    optimizer = torch.optim.SGD([weight], lr=1e-8, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((weight * (torch.inf if bad else 1.0)).sum()).backward()
    with frozen_updates(optimizer) as updates:
        scaler.step(optimizer)
    assert (updates.frozen, updates.wanted) == ((0, 0) if bad else (1, 2))


def pair_with_grads(**options):
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    model, optimizer = prepared("O5", lambda p: torch.optim.SGD(p, lr=1e-4), model, **options)
    scaled_backward(model(torch.rand(2, 4)).sum(), optimizer)
    return model, optimizer


def test_an_amp_optimizer_steps_the_same_as_without_the_block():
    results = []
    for counts in (True, False):
        torch.manual_seed(0)
        model, optimizer = pair_with_grads()
        if counts:
            with frozen_updates(optimizer):
                optimizer.step()
        else:
            optimizer.step()
        results.append([*model.parameters(), *amp.master_params(optimizer)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_hooks_and_schedulers_see_one_step_only():
    optimizer = torch.optim.SGD([weight_of([1.0], torch.float32)], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with frozen_updates(optimizer):
        optimizer.step()
    scheduler.step()
    assert calls == [1]


def test_an_optimizer_that_needs_a_closure_is_refused():
    optimizer = torch.optim.LBFGS([weight_of([1.0], torch.float32)])
    with pytest.raises(TypeError, match="closure"), frozen_updates(optimizer):
        optimizer.step(lambda: 1.0)
