"""Optimizers that keep fp32 masters of 16-bit parameters themselves."""

import pytest
import torch

from apex import optimizers
from tests.optimizers import cases

MAKERS = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-4, capturable=True, master_weights=True),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(
        p, lr=1e-4, reduced_precision_dtype=torch.bfloat16
    ),
}
WIDE = {
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-4, capturable=True),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=1e-4),
}
every = pytest.mark.parametrize("name", MAKERS)


def run(name, steps):
    params = cases.parameters(torch.bfloat16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, reference = MAKERS[name](params), WIDE[name](wide)
    for step in range(steps):
        cases.give(params, cases.gradients(params, step))
        cases.give(wide, [p.grad.float() for p in params])
        optimizer.step()
        reference.step()
    return optimizer, params, wide


@every
def test_masters_move_as_fp32_parameters_do(name):
    optimizer, params, wide = run(name, 4)
    masters = [optimizer.state[p]["master_param"] for p in params]
    cases.assert_same(masters, wide, rtol=0, atol=0)


@every
def test_parameters_are_their_rounded_masters(name):
    _, params, wide = run(name, 4)
    cases.assert_same(params, [p.to(torch.bfloat16) for p in wide], rtol=0, atol=0)


@every
def test_fp32_parameters_get_no_master(name):
    params = cases.parameters()
    optimizer = MAKERS[name](params)
    cases.run(optimizer, params, 1)
    assert not any("master_param" in state for state in optimizer.state.values())


@every
def test_resume_keeps_the_masters(name):
    optimizer, params, _ = run(name, 2)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = MAKERS[name](resumed)
    other.load_state_dict(optimizer.state_dict())
    masters = [[o.state[p]["master_param"] for p in ps]
               for o, ps in ((optimizer, params), (other, resumed))]  # fmt: skip
    cases.assert_same(*masters, rtol=0, atol=0)


@every
def test_learning_rate_and_count_are_tensors(name):
    optimizer, _, _ = run(name, 2)
    (group,) = optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor)
    assert group["step"].dtype is torch.int32


def test_mixed_precision_lamb_counts_on_from_its_step():
    params, twins = cases.parameters(), cases.parameters()
    optimizer = optimizers.FusedMixedPrecisionLamb(params, step=5)
    reference = optimizers.FusedLAMB(twins)
    reference.param_groups[0]["step"] = 5
    cases.run(optimizer, params, 2)
    cases.run(reference, twins, 2)
    cases.assert_same(params, twins, rtol=1e-5, atol=1e-6)
