"""Orthogonal weights are computed in fp32, also inside 16-bit models."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations

from apex import amp
from tests.support.loops import every, prepared, same, scaled_backward

LOW = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
MAPS = ["matrix_exp", "cayley", "householder"]


def orthogonal(by, level="O5"):
    torch.manual_seed(0)
    model = parametrizations.orthogonal(nn.Linear(4, 4, bias=False), orthogonal_map=by)
    (original,) = model.parameters()
    with torch.no_grad():
        original.add_(torch.randn_like(original), alpha=0.25)  # else the weight is the base
        for tensor in (original, *model.buffers()):  # exact in 16 bits
            tensor.copy_(tensor.to(LOW[level]))
    return model


@every(level=LOW, by=MAPS)
def test_an_orthogonal_weight_is_the_rounded_one_of_fp32(by, level):
    model = orthogonal(by, level)
    plain = copy.deepcopy(model)
    x = torch.eye(4)
    plain(x).cos().sum().backward()
    model, optimizer = prepared(level, model=model, loss_scale=1.0)
    assert same(model.weight, plain.weight.to(LOW[level]))
    scaled_backward(model(x).float().cos().sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    wanted = plain.parametrizations.weight.original.grad
    roundings = 8 * torch.finfo(LOW[level]).eps
    torch.testing.assert_close(master.grad.float(), wanted, rtol=roundings, atol=roundings)
