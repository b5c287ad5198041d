"""On a CUDA device: the same numbers as on the CPU, and no wait for the device."""

import pytest
import torch

import amp_C
from tests.optimizers import cases

pytestmark = pytest.mark.gpu


@pytest.fixture
def syncs_are_errors():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


def on_gpu(params):
    return [torch.nn.Parameter(p.detach().cuda()) for p in params]


def step(optimizer, params, grads, found_inf):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.found_inf = found_inf
    optimizer.step()
    del optimizer.found_inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", cases.MAKERS)
def test_steps_are_those_of_the_cpu(name, dtype):
    params = cases.parameters(dtype)
    twins = on_gpu(params)
    optimizer, reference = cases.MAKERS[name](twins), cases.MAKERS[name](params)
    for index in range(3):
        grads = cases.gradients(params, index)
        cases.give(params, grads)
        cases.give(twins, [g.cuda() for g in grads])
        optimizer.step()
        reference.step()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {}
    cases.assert_same([t.cpu() for t in twins], params, **tolerance)


@pytest.mark.parametrize("name", cases.MAKERS)
def test_dynamic_steps_wait_for_nothing(name, request):
    params = on_gpu(cases.parameters())
    optimizer = cases.MAKERS[name](params)
    flags = [torch.tensor(float(value), device="cuda") for value in (0, 0, 1)]
    grads = [[g.cuda() for g in cases.gradients(params, index)] for index in range(3)]
    grads[2][0].fill_(float("nan"))
    step(optimizer, params, grads[0], flags[0])  # dampening asks once, at its start
    request.getfixturevalue("syncs_are_errors")
    step(optimizer, params, grads[1], flags[1])
    before = [p.detach().clone() for p in params]
    step(optimizer, params, grads[2], flags[2])
    torch.cuda.set_sync_debug_mode("default")
    cases.assert_same(params, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", cases.MAKERS)
def test_steps_without_a_flag_wait_for_nothing(name, syncs_are_errors):
    torch.cuda.set_sync_debug_mode("default")
    params = on_gpu(cases.parameters())
    optimizer = cases.MAKERS[name](params)
    cases.give(params, [g.cuda() for g in cases.gradients(params, 0)])
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    optimizer.step()


def test_scale_and_norm_write_the_flag_without_waiting(syncs_are_errors):
    torch.cuda.set_sync_debug_mode("default")
    sources = [g.cuda() for g in cases.gradients(cases.parameters(), 0)]
    sources[0].view(-1)[0] = float("inf")
    targets = [torch.empty_like(s, dtype=torch.float16) for s in sources]
    flags = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2)]
    torch.cuda.set_sync_debug_mode("error")
    amp_C.multi_tensor_scale(65536, flags[0], [sources, targets], 0.5)
    amp_C.multi_tensor_l2norm(65536, flags[1], [sources], True)
    torch.cuda.set_sync_debug_mode("default")
    assert [flag.item() for flag in flags] == [1, 1]
