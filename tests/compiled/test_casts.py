"""User functions, and parts without casts, compiled while a session casts in this thread."""

import pytest
import torch
from torch import nn

from apex import amp
from tests.compiled.cases import GENERATORS, compiled
from tests.support.loops import prepared

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def session():
    return prepared("O4")


def test_a_model_without_casts_computes_in_fp32():
    plain, _ = prepared("O0")
    run, graphs = compiled(plain)
    assert (run(torch.randn(3, 4)).dtype, graphs.frame_count) == (torch.float32, 1)


@pytest.mark.parametrize(
    ("wrap", "given", "wanted"),
    [
        (amp.half_function, torch.float32, torch.bfloat16),
        (amp.float_function, torch.bfloat16, torch.float32),
        (amp.promote_function, torch.float32, torch.float32),
    ],
)
def test_user_functions_cast(wrap, given, wanted):
    run, _ = compiled(wrap(torch.maximum))
    assert run(torch.ones(2, dtype=given), torch.ones(2, dtype=torch.bfloat16)).dtype is wanted


@GENERATORS
def test_the_backward_pass_of_code_under_disable_casts_is_that_of_fp32():
    layer, x, gradients = nn.Linear(4, 4), torch.randn(3, 4), []

    def fn(x):
        with amp.disable_casts():
            return layer(x).exp().sum()

    for run in (fn, compiled(fn)[0]):
        run(x).backward()
        gradients.append(layer.weight.grad.clone())
        layer.zero_grad()
    assert torch.equal(*gradients)
