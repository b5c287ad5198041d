"""O4 keeps GELU in bf16, which has the range of fp32; O1 runs it in fp32, as apex did."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apex.amp as amp
from tests.support.steps import prepared


def gelu_of(dtype):
    return F.gelu(torch.ones(2, dtype=dtype)).dtype


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_bf16_at_o4_and_is_fp32_at_o1(approximate):
    for level, result in (("O1", torch.float32), ("O4", torch.bfloat16)):
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(approximate))
        model = amp.initialize(model, opt_level=level, verbosity=0)
        assert model(torch.randn(2, 4)).dtype is result


def test_o4_with_fp16_casts_runs_gelu_in_fp32():
    keep = prepared("O4", patch_torch_functions_type=torch.float16)
    assert gelu_of(torch.float16) is torch.float32
    del keep


def test_a_user_may_have_gelu_in_fp32_at_o4():
    amp.register_float_function(F, "gelu")
    keep = prepared("O4")
    assert gelu_of(torch.bfloat16) is torch.float32
    del keep
