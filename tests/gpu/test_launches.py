"""What a GPU is asked to do, by count: launches, targets of one dtype, memory."""

import functools

import pytest
import torch
from torch import nn

import amp_C
from apex import amp, fp16_utils, optimizers
from apex._engine.optimizer import block_step
from benchmarks.launches import LaunchCounter, machinery
from benchmarks.loops import fused_adamw, with_amp
from benchmarks.memory import peak_bytes
from tests.support import loops

pytestmark = [pytest.mark.gpu, pytest.mark.emulated]


@pytest.mark.parametrize(("max_norm", "most"), [(None, 8), (0.1, 14)])
def test_a_step_of_8_million_parameters_takes_few_launches(max_norm, most):
    counted = machinery("O5", fused_adamw, max_norm=max_norm)
    assert counted.launches <= most
    assert counted.calls["_fused_adamw_"] == 1


def test_a_large_model_steps_in_blocks_with_little_memory(monkeypatch):
    monkeypatch.setattr(block_step, "device_elements", 2**16)
    task = loops.large_task()
    params = 3 * 2**20
    work = with_amp(task, "O5")
    assert peak_bytes(work, 14 * params) / params <= 16.5
    with LaunchCounter() as counted:
        work()
    assert counted.calls["_fused_adamw_"] == params / 2**16


def test_copies_into_lists_of_several_dtypes_are_right_and_refused_in_one_call():
    dtypes = [torch.float16, torch.float32, torch.bfloat16]
    sources = [torch.full((3,), 2.0, device="cuda") for _ in dtypes]
    targets = [nn.Parameter(torch.zeros(3, device="cuda", dtype=dtype)) for dtype in dtypes]
    with pytest.raises(RuntimeError, match="targets of several dtypes"):
        torch._foreach_copy_([target.data for target in targets], sources)
    fp16_utils.master_params_to_model_params(targets, sources)
    assert [target.tolist() for target in targets] == [[2.0] * 3] * 3
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    amp_C.multi_tensor_scale(65536, flag, [sources, [p.data for p in targets]], 3.0)
    assert [target.tolist() for target in targets] == [[6.0] * 3] * 3


def counted_step(make_optimizer, *, flag, groups=1, elements=2**14):
    params = [nn.Parameter(torch.ones(elements, device="cuda")) for _ in range(32)]
    share = 32 // groups
    optimizer = make_optimizer([{"params": params[i : i + share]} for i in range(0, 32, share)])
    for param in params:
        param.grad = torch.ones_like(param)
    if flag:
        optimizer.found_inf = torch.zeros((), device="cuda")
    for _ in range(2):
        optimizer.step()
    with LaunchCounter() as counted:
        optimizer.step()
    assert "_local_scalar_dense" not in counted.calls
    return counted.launches, counted.bytes / (32 * elements)


MOST_BYTES = [
    (optimizers.FusedLAMB, 82),
    (optimizers.FusedNovoGrad, 54),
    (optimizers.FusedAdagrad, 50),
    (functools.partial(optimizers.FusedNovoGrad, reg_inside_moment=True), 54),
    (functools.partial(optimizers.FusedAdagrad, adagrad_w_mode=True, weight_decay=0.1), 50),
]


@pytest.mark.parametrize(("kind", "most"), MOST_BYTES)
def test_a_flag_costs_an_optimizer_few_bytes(kind, most):
    _, plain = counted_step(kind, flag=False)
    _, flagged = counted_step(kind, flag=True)
    assert flagged <= min(most, plain + 1)


def test_groups_cost_launches_of_their_kernels_only():
    fused_adam, _ = counted_step(optimizers.FusedAdam, flag=True, groups=32)
    adamw, _ = counted_step(functools.partial(torch.optim.AdamW, fused=True), flag=True, groups=32)
    assert fused_adam <= adamw


def test_gradients_of_several_dtypes_add_up(monkeypatch):
    monkeypatch.setattr(amp._amp_state, "allow_incoming_model_not_fp32", True)
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).half()]).cuda()
    model, optimizer = loops.prepared("O1", model=net, loss_scale=2.0)
    for _ in range(2):
        loops.scaled_backward(sum(param.float().sum() for param in model.parameters()), optimizer)
    assert [param.grad.unique().tolist() for param in model.parameters()] == [[2.0]] * 4
