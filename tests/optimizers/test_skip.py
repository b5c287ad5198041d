"""A set flag leaves parameters, state and counts as they are, and nobody waits for it."""

import pytest
import torch

from tests.optimizers import cases

every = pytest.mark.parametrize("name", cases.MAKERS)


def step(optimizer, params, grads, found_inf):
    cases.give(params, grads)
    optimizer.found_inf = torch.tensor(float(found_inf))
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def overflowed(params):
    grads = cases.gradients(params, 50)
    grads[0].view(-1)[0] = float("inf")
    grads[1].view(-1)[1] = float("nan")
    return grads


@every
@pytest.mark.parametrize("eps", [None, 0.0])
@pytest.mark.parametrize("flag", [1, 2])
def test_set_flag_leaves_all_as_it_is(name, flag, eps):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    for group in optimizer.param_groups:
        if eps is not None and "eps" in group:
            group["eps"] = eps
    cases.run(optimizer, params, 2)
    before = cases.snapshot(optimizer)
    step(optimizer, params, overflowed(params), flag)
    after = cases.snapshot(optimizer)
    cases.assert_same(before[0], after[0], rtol=0, atol=0)
    assert before[1].keys() == after[1].keys()
    cases.assert_same(before[1].values(), after[1].values(), rtol=0, atol=0)
    assert before[2] == after[2]


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skipped_first_step_counts_as_none(name, dtype):
    params, twins = cases.parameters(dtype), cases.parameters(dtype)
    optimizer, reference = cases.MAKERS[name](params), cases.MAKERS[name](twins)
    step(optimizer, params, overflowed(params), 1)
    cases.assert_same(params, twins, rtol=0, atol=0)
    for index in range(3):
        step(optimizer, params, cases.gradients(params, index), 0)
        step(reference, twins, cases.gradients(twins, index), 0)
    cases.assert_same(params, twins, rtol=0, atol=0)


@every
def test_a_state_has_the_same_types_whether_or_not_a_flag_decided_about_the_step(name):
    """A distributed checkpoint loads numbers into numbers only, and tensors into tensors."""
    params, twins = cases.parameters(), cases.parameters()
    optimizer, plain = cases.MAKERS[name](params), cases.MAKERS[name](twins)
    step(optimizer, params, cases.gradients(params, 0), 0)
    cases.run(plain, twins, 1)
    groups, own = (each.state_dict()["param_groups"] for each in (optimizer, plain))
    assert [{key: type(value) for key, value in group.items()} for group in groups] == [
        {key: type(value) for key, value in group.items()} for group in own
    ]


@every
def test_flag_that_is_down_changes_nothing(name):
    params, twins = cases.parameters(), cases.parameters()
    optimizer, reference = cases.MAKERS[name](params), cases.MAKERS[name](twins)
    for index in range(3):
        step(optimizer, params, cases.gradients(params, index), 0)
    cases.run(reference, twins, 3)
    # Coefficients are fp32 tensors in the one and doubles in the other.
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)


@every
def test_step_by_flag_reads_nothing_on_the_host(name):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    # Dampening asks once, for the start of the momentum.
    step(optimizer, params, cases.gradients(params, 0), 0)
    with cases.HostReads() as reads:
        step(optimizer, params, cases.gradients(params, 1), 0)
        step(optimizer, params, overflowed(params), 1)
    assert reads.count == 0


@every
def test_count_becomes_a_device_tensor_only_by_a_flag(name):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    made = isinstance(optimizer.param_groups[0].get("step"), torch.Tensor)
    cases.run(optimizer, params, 1)
    assert isinstance(optimizer.param_groups[0]["step"], torch.Tensor) is made
    step(optimizer, params, cases.gradients(params, 1), 0)
    assert int(optimizer.param_groups[0]["step"]) == 2


@every
def test_grad_scale_divides_gradients(name):
    params, twins = cases.parameters(), cases.parameters()
    optimizer, reference = cases.MAKERS[name](params), cases.MAKERS[name](twins)
    cases.run(reference, twins, 1)
    cases.give(params, [g * 256.0 for g in cases.gradients(params, 0)])
    optimizer.grad_scale = torch.tensor(256.0)
    optimizer.step()
    cases.assert_same(params, twins, rtol=0, atol=0)


def test_no_flag_lets_inf_through():
    params = cases.parameters()
    optimizer = cases.MAKERS["FusedAdam"](params)
    cases.give(params, overflowed(params))
    optimizer.step()
    assert torch.isnan(params[0]).any()
