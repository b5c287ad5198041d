"""User functions, and parts without casts, compiled while a session casts in this thread."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from tests.compiled.cases import GENERATORS, compiled
from tests.support.features import TORCH_VERSION
from tests.support.loops import Body, InBackward, prepared, same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def session():
    return prepared("O4")


def test_a_model_without_casts_computes_in_fp32():
    plain, _ = prepared("O0")
    run, graphs = compiled(plain)
    assert (run(torch.randn(3, 4)).dtype, graphs.frame_count) == (torch.float32, 1)


WRAPPERS = [
    (amp.half_function, torch.float32, torch.bfloat16),
    (amp.float_function, torch.bfloat16, torch.float32),
    (amp.promote_function, torch.float32, torch.float32),
]


@pytest.mark.parametrize(("wrap", "given", "wanted"), WRAPPERS)
def test_user_functions_cast(wrap, given, wanted):
    run, _ = compiled(wrap(torch.maximum))
    assert run(torch.ones(2, dtype=given), torch.ones(2, dtype=torch.bfloat16)).dtype is wanted


@dataclass
class Node:
    h: Tensor
    parent: object = None


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="this torch does not trace copies")
def test_a_dataclass_that_refers_to_itself_is_traced():
    node = Node(torch.ones(2))
    node.parent = node
    run, graphs = compiled(amp.half_function(lambda node: node.h + 1))
    assert (run(node).dtype, graphs.frame_count) == (torch.bfloat16, 1)


doubled, _ = compiled(lambda x: x + x)


def test_compiled_code_runs_in_a_block_and_in_backward_as_one_graph(session):
    model, optimizer = session
    run, graphs = compiled(model)
    x = torch.randn(3, 4, requires_grad=True)
    loss = model(InBackward.apply(x, doubled)).float().sum()
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert same(run(x), model(x))
        scaled_loss.backward()
    assert graphs.frame_count == 1
    assert same(x.grad, grad)


class Loop(nn.Linear):
    def forward(self, x):
        for _ in range(5):
            x = super().forward(x).tanh().float()
        return x


def kept_16_bit(run):
    """The bytes of weights in 16 bits that the graph of ``run`` keeps."""
    sizes = {}

    def pack(tensor):
        if tensor.dtype is torch.bfloat16 and tensor.numel() == 64:
            sizes[tensor.untyped_storage().data_ptr()] = 128
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(torch.ones(1, 8, requires_grad=True))
    assert output.requires_grad
    return sum(sizes.values())


@pytest.mark.skipif(TORCH_VERSION < (2, 11), reason="this torch casts a weight at each use")
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_loop_in_a_compiled_forward_keeps_what_autocast_keeps(backend):
    plain = Loop(8, 8)
    with amp.disable_casts(), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        wanted = kept_16_bit(torch.compile(plain, backend=backend))
    torch._dynamo.reset()
    model, _ = prepared("O4", model=plain)
    assert kept_16_bit(torch.compile(model, backend=backend)) == wanted > 0


def test_compiled_code_sees_each_write():
    model, _ = prepared("O4", model=nn.Linear(4, 4))
    run, x = torch.compile(model, backend="aot_eager"), torch.ones(2, 4)
    outputs, wanted = [], []
    for write in (Tensor.mul_, Tensor.add_):
        outputs.append(run(x))
        wanted.append(model(x))
        write(model.weight.data, 0.5)
    assert same([*outputs, run(x)], [*wanted, model(x)])
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads after a break
def test_eager_parts_of_compiled_code_see_each_write():
    @torch.compiler.disable
    def apart(module, x):
        return module(x)

    layer = nn.Linear(4, 4)
    model, _ = prepared("O4", model=Body(lambda self, x: apart(self.layer, x), layer=layer))
    run, x = torch.compile(model, backend="aot_eager"), torch.ones(2, 4)
    for _ in range(2):
        _awaits_its_backward = model(x)
        layer.weight.data.mul_(0.5)
        output = run(x)
        assert same(output, model(x))


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
