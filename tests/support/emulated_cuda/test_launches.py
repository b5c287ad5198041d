"""What a GPU is asked to do, by count: launches, targets of one dtype, memory."""

import pytest
import torch
from torch import nn

import amp_C
from apex import fp16_utils
from apex._engine.optimizer import block_step
from benchmarks.launches import LaunchCounter, machinery
from benchmarks.loops import fused_adamw, with_amp
from benchmarks.memory import peak_bytes
from tests.support import loops

pytestmark = [pytest.mark.gpu, pytest.mark.emulated]


@pytest.mark.parametrize(("max_norm", "most"), [(None, 8), (0.1, 15)])
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
