"""Under another default dtype nothing changes but the dtype of new parameters."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch

import apex
from apex import RNN
from apex.contrib.layer_norm import FastLayerNorm
from apex.fused_dense import FusedDenseGeluDense
from apex.mlp import MLP
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.parallel import SyncBatchNorm
from apex.reparameterization import apply_weight_norm
from tests.support import optimizers as cases

FP32 = torch.float32
OTHERS = pytest.mark.parametrize("dtype", [torch.bfloat16])


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_same_under(dtype, run):
    """Runs twice and compares everything, dtypes too."""
    expected = run()
    with default(dtype):
        found = run()
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    cases.assert_same(found, expected, rtol=0, atol=0)


def trained(name, flag):
    params = cases.parameters()
    optimizer = cases.MAKERS[name](params)
    if flag is not None:
        optimizer.found_inf, optimizer.grad_scale = flag, torch.full((), 2.0, dtype=FP32)
    for step in range(3):
        cases.give(params, [g.to(FP32) for g in cases.gradients(params, step, FP32)])
        optimizer.step()
    return [*params, *(t for state in optimizer.state.values() for t in state.values())]


@OTHERS
@pytest.mark.parametrize("name", cases.MAKERS)
def test_optimizers_step_alike(name, dtype):
    with default(FP32):
        flags = [None, torch.zeros(()), torch.ones(())]
    for flag in flags:
        assert_same_under(dtype, lambda flag=flag: trained(name, flag))


FORWARD = {
    "FusedLayerNorm": lambda: FusedLayerNorm(8),
    "FusedRMSNorm": lambda: FusedRMSNorm(8, elementwise_affine=False),
    "FastLayerNorm": lambda: FastLayerNorm(8),
    "SyncBatchNorm": lambda: SyncBatchNorm(8),
    "MLP": lambda: MLP([8, 4]),
    "FusedDenseGeluDense": lambda: FusedDenseGeluDense(8, 6, 4),
    "LSTM": lambda: RNN.LSTM(8, 4, 1),
    "GRU": lambda: RNN.GRU(8, 4, 1),
    "mLSTM": lambda: RNN.mLSTM(8, 4, 1, output_size=2),
    "weight norm": lambda: apply_weight_norm(torch.nn.Linear(8, 4)),
}


@OTHERS
@pytest.mark.parametrize("name", FORWARD)
def test_modules_compute_alike_in_the_dtype_of_their_parameters(name, dtype):
    torch.manual_seed(0)
    module = FORWARD[name]()  # with fp32 parameters
    x = torch.randn(*((5, 3, 8) if name in ("LSTM", "GRU", "mLSTM") else (6, 8)))

    def run():
        if hasattr(module, "reset_hidden"):
            module.reset_hidden(3)
        module.zero_grad()
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in module.parameters())]

    assert_same_under(dtype, run)


MADE = {"full", "zeros", "ones", "empty", "tensor", "arange", "as_tensor", "linspace", "eye"}
PACKAGES = (
    "_core optimizers normalization parallel contrib RNN reparameterization mlp fused_dense "
    "fp16_utils multi_tensor_apply _autocast_utils"
)


def is_maker(node):
    called = node.func if isinstance(node, ast.Call) else None
    owner = called.value if isinstance(called, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "torch" and called.attr in MADE


def test_every_new_tensor_that_is_no_parameter_states_dtype_and_device():
    source, found = Path(apex.__file__).parent, []
    for path in (file for name in PACKAGES.split() for file in (source / name).rglob("*.py")):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        params = [c for c in calls if ast.unparse(c.func) == "nn.Parameter"]
        made = {id(each) for param in params for each in ast.walk(param)}
        for call in filter(is_maker, calls):
            stated = {keyword.arg for keyword in call.keywords}
            if not {"dtype", "device"} <= stated and id(call) not in made:
                found.append(f"{path.name}: {ast.unparse(call)}")
    assert found == []
