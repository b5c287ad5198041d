"""Cast regions under torch.compile: the dtypes of eager, and nothing left in its caches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apex._core.op_table import AutocastSpec, OpTable
from apex._engine.autocast.region import AutocastRegion, NoAutocastRegion, casts_off
from apex._engine.autocast.user_functions import cast_function
from apex._torch.dispatcher import release

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Model(nn.Module):
    """Rows of torch and filled ones, composites among them."""

    def __init__(self, region):
        super().__init__()
        self.linear, self.norm, self.region = nn.Linear(4, 4), nn.LayerNorm(4), region

    def layers(self, x):
        low = self.linear(x)
        soft, norm, exp = torch.softmax(low, 1), self.norm(low), low.exp()
        big = nn.functional.interpolate(low[None, None], scale_factor=2.0, mode="bilinear")
        product = torch.einsum("ij,kj->ik", x, exp)
        return low, soft, norm, exp, big, product, low.sum(), torch.addcmul(low, x, low)

    def forward(self, x):
        return self.region.run(self.layers, x)


@pytest.fixture
def model():
    region = AutocastRegion(AutocastSpec(torch.bfloat16, ("cpu",), OpTable.default()))
    yield Model(region)
    region.leave_ambient()
    torch._dynamo.reset()


def compiled(model, backend):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ambient", [True, False], ids=["ambient", "run-only"])
def test_compiled_region_gives_the_dtypes_and_gradients_of_eager(model, backend, ambient):
    x = torch.randn(3, 4)
    if ambient:
        model.region.enter_ambient()
    eager = model(x)
    with casts_off():
        sum(y.float().sum() for y in eager).backward()
    wanted = model.linear.weight.grad.clone()
    model.zero_grad()
    got = compiled(model, backend)(x)
    with casts_off():
        sum(y.float().sum() for y in got).backward()
    assert [y.dtype for y in got] == [y.dtype for y in eager]
    for ours, theirs in zip(got, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(model.linear.weight.grad, wanted, rtol=5e-2, atol=5e-2)


def test_compiled_uncast_region_is_off_under_ambient_casts(model):
    model.region.enter_ambient()
    plain = Model(NoAutocastRegion())
    assert {y.dtype for y in compiled(plain, "aot_eager")(torch.randn(3, 4))} == {torch.float32}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("low_precision", torch.bfloat16), ("float", torch.float32), ("promote", torch.float32)],
)
@pytest.mark.parametrize("ambient", [True, False], ids=["ambient", "run-only"])
def test_cast_functions_compile(model, kind, wanted, ambient):
    fn = cast_function(torch.maximum, kind)
    a, b = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    if kind == "float":
        a = b
    if ambient:
        model.region.enter_ambient()
        run = compiled(fn, "aot_eager")
    else:
        run = compiled(lambda a, b: model.region.run(fn, a, b), "aot_eager")
    assert run(a, b).dtype is wanted


@pytest.mark.skipif(release < (2, 7), reason="this torch traces no generator's context")
def test_compiled_backward_of_code_under_disable_casts_is_that_of_fp32(model):
    x = torch.randn(3, 4)

    def fn(x):
        with casts_off():
            return model.linear(x).exp().sum()

    fn(x).backward()
    wanted = model.linear.weight.grad.clone()
    model.zero_grad()
    compiled(lambda x: model.region.run(fn, x), "aot_eager")(x).backward()
    assert torch.equal(model.linear.weight.grad, wanted)
