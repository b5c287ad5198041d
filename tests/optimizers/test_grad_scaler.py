"""torch's own GradScaler steps the optimizers without a host sync and without a warning."""

import pytest
import torch

from tests.optimizers import cases

every = pytest.mark.parametrize("name", cases.MAKERS)


def scaled(params, scaler, factor=1.0):
    """Leaves scaled gradients of a quadratic loss."""
    for param in params:
        param.grad = None
    loss = sum(((p - 1.0) ** 2).sum() for p in params) * factor
    scaler.scale(loss).backward()


def pair(name):
    params, twins = cases.parameters(), cases.parameters()
    return (
        cases.MAKERS[name](params), params, cases.MAKERS[name](twins), twins,
        torch.amp.GradScaler("cpu", init_scale=64.0),
    )  # fmt: skip


@every
def test_step_is_that_of_unscaled_gradients(name):
    optimizer, params, reference, twins, scaler = pair(name)
    scaled(params, scaler)
    scaler.step(optimizer)
    scaler.update()
    scaled(twins, torch.amp.GradScaler("cpu", enabled=False))
    reference.step()
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)


@every
def test_overflow_is_skipped(name):
    optimizer, params, _, twins, scaler = pair(name)
    scaled(params, scaler, factor=float("inf"))
    scaler.step(optimizer)
    scaler.update()
    cases.assert_same(params, twins, rtol=0, atol=0)
    assert scaler.get_scale() == 32.0


@every
def test_gradients_that_were_unscaled_are_not_divided_again(name):
    optimizer, params, reference, twins, scaler = pair(name)
    scaled(params, scaler)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaled(twins, torch.amp.GradScaler("cpu", enabled=False))
    reference.step()
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
def test_grad_scaler_may_be_an_argument_of_step(name, unscaled):
    optimizer, params, reference, twins, scaler = pair(name)
    scaled(params, scaler)
    if unscaled:
        scaler.unscale_(optimizer)
    optimizer.step(grad_scaler=scaler)
    scaled(twins, torch.amp.GradScaler("cpu", enabled=False))
    reference.step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)
