"""torch.compile takes the norms whole, with the results of eager."""

import pytest
import torch

from apex import normalization
from tests.normalization import cases
from tests.normalization.cases import BF16, FULL, SIZE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_caches():
    yield
    torch.compiler.reset()


def compiled(fn):
    # aot_eager: dynamo and autograd as with inductor, without a C++ compiler.
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("weight_dtype", [FULL, BF16])
@pytest.mark.parametrize("name", cases.AFFINE)
def test_functions_compile_whole_with_equal_results_and_gradients(name, weight_dtype):
    made = cases.tensors(FULL, weight_dtype)
    inputs = cases.leaves(name, *made)
    eager, graph = cases.run(name, *made), compiled(cases.run)(name, *made)
    torch.testing.assert_close(graph, eager)
    for one, other in zip(
        cases.gradients(graph, inputs), cases.gradients(eager, inputs), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", cases.MODULES)
def test_modules_compile_whole_under_autocast(name):
    module, x = getattr(normalization, name)(SIZE), torch.randn(3, SIZE)

    def forward(x):
        with torch.autocast("cpu", BF16):
            return module(x), torch.mm(x, x.T)

    for graph, eager in zip(compiled(forward)(x), forward(x), strict=True):
        assert graph.dtype is BF16
        torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("name", [*cases.AFFINE, *cases.PLAIN])
def test_autograd_functions_compile_whole_with_equal_gradients(name):
    function = getattr(normalization.fused_layer_norm, cases.FUNCTION_CLASSES[name])
    x, weight, bias = cases.tensors()
    inputs = cases.leaves(name, x, weight, bias) if name in cases.AFFINE else [x]

    def forward(*inputs):
        return function.apply(*inputs, (SIZE,), 1e-5, True)

    results = [compiled(forward)(*inputs), forward(*inputs)]
    torch.testing.assert_close(*results)
    for one, other in zip(*(cases.gradients(r, inputs) for r in results), strict=True):
        torch.testing.assert_close(one, other)
