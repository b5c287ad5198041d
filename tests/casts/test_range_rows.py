"""O4 keeps GELU in bf16, which has the range of fp32; O1 runs it in fp32, as apex did."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apex.amp as amp
from benchmarks.memory import kept_bytes
from benchmarks.networks import Bert
from tests.support.steps import prepared


def gelu_of(dtype):
    return F.gelu(torch.ones(2, dtype=dtype)).dtype


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_bf16_at_o4_and_is_fp32_at_o1(approximate):
    for level, result in (("O1", torch.float32), ("O4", torch.bfloat16)):
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(approximate))
        model = amp.initialize(model, opt_level=level, verbosity=0)
        assert model(torch.randn(2, 4)).dtype is result


def test_each_session_follows_its_own_dtype_while_both_live():
    models = {}
    for level in ("O1", "O4", "O1"):
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        models[level] = amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(2, 4)
    assert models["O1"](x).dtype is torch.float32
    assert models["O4"](x).dtype is torch.bfloat16


def test_o4_with_fp16_casts_runs_gelu_in_fp32():
    keep = prepared("O4", patch_torch_functions_type=torch.float16)
    assert gelu_of(torch.float16) is torch.float32
    del keep


def test_gelu_follows_torch_once_the_sessions_ended():
    keep = prepared("O1")
    assert gelu_of(torch.float16) is torch.float32
    del keep
    gc.collect()
    assert gelu_of(torch.float16) is torch.float16


def test_a_user_may_have_gelu_in_fp32_at_o4():
    amp.register_float_function(F, "gelu")
    keep = prepared("O4")
    assert gelu_of(torch.bfloat16) is torch.float32
    del keep


def test_a_gelu_transformer_keeps_what_it_keeps_under_autocast():
    torch.manual_seed(0)
    model = Bert(layers=2, width=32, heads=2, vocabulary=50, positions=16)
    tokens, labels = torch.randint(50, (4, 16)), torch.randint(2, (4,))

    def run():
        return F.cross_entropy(model(tokens), labels)

    with torch.autocast("cpu", torch.bfloat16):
        expected, of_autocast = kept_bytes(run)
    expected.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    model = amp.initialize(model, opt_level="O4", verbosity=0)
    loss, ours = kept_bytes(run)
    loss.backward()
    assert ours <= of_autocast
    torch.testing.assert_close(loss, expected, rtol=2**-7, atol=0)
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert param.grad.dtype is torch.float32
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=2**-5 * float(grad.norm()))
