"""Under another default dtype nothing changes but the dtype of new parameters."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch

import amp_C
import apex
import fused_adam_cuda
import fused_layer_norm_cuda
from apex import RNN, optimizers
from apex.contrib import optimizers as contrib
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.fused_dense import FusedDenseGeluDense
from apex.mlp import MLP
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.parallel import LARC, SyncBatchNorm
from apex.reparameterization import apply_weight_norm
from tests.support import optimizers as cases

FP32 = torch.float32
OTHERS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])


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


def wrapped():
    """The other optimizers: LARC, and both FP16_Optimizers with a static and a dynamic scale."""
    found = []
    for kind in (optimizers.FP16_Optimizer, contrib.FP16_Optimizer):
        for dynamic in (False, True):
            params = cases.parameters(torch.float16, [(3, 4)])
            inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
            options = {"init_scale": 8.0} if dynamic else None
            optimizer = kind(inner, 8.0, dynamic, options)
            for _ in range(2):
                optimizer.zero_grad()
                optimizer.backward(params[0].to(FP32).square().sum())
                optimizer.clip_master_grads(1.0)
                optimizer.step()
            found += [*params, *optimizer.all_fp32_from_fp16_params]
    params = cases.parameters()
    cases.give(params, cases.gradients(params, 0, FP32))
    LARC(torch.optim.SGD(params, lr=0.1)).step()
    norm = clip_grad_norm_(params, 1.0)
    return [*found, *params, norm, clip_grad_norm_([], 1.0)]


@OTHERS
def test_wrappers_and_clipping_work_alike(dtype):
    assert_same_under(dtype, wrapped)


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


def functions():
    """amp_C, the ``_cuda`` modules and the loss."""
    lists = [[t.to(FP32) for t in cases.gradients(cases.parameters(), s, FP32)] for s in range(4)]
    found, overflow = [], torch.zeros(1, dtype=torch.int32)
    one = torch.ones(1, dtype=FP32)
    found += amp_C.multi_tensor_l2norm(1, overflow, lists[:1], True)
    found += amp_C.multi_tensor_unscale_l2norm(1, overflow, lists[:1], 0.5, True)
    amp_C.multi_tensor_scale(1, overflow, lists[:2], 1 / 3)
    amp_C.multi_tensor_axpby(1, overflow, lists[:3], 1 / 3, 0.7, -1)
    squares = [t.square() for t in lists[3]]
    adam = (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1)
    amp_C.multi_tensor_adam(1, overflow, [*lists[:3], squares], *adam)
    amp_C.multi_tensor_adam_capturable(1, overflow, [*lists[:3], squares], *adam, one)
    lamb = (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 1, one, 1.0, False)
    amp_C.multi_tensor_lamb(1, overflow, [*lists[:3], squares], *lamb)
    amp_C.multi_tensor_sgd(1, overflow, lists[:3], 0.1, 0.9, 0.0, 0.1, False, False, False)
    amp_C.multi_tensor_adagrad(1, overflow, [*lists[:2], squares], 0.1, 1e-8, 0, 0.1)
    p, g, m, v = lists[0][0], lists[1][0], lists[2][0], squares[0]
    fused_adam_cuda.adam(p, p.new_empty(0), m, v, g, 0.1, 0.9, 0.99, 1e-8, 2.0, 1, 1, 1, 0.1)
    found += fused_layer_norm_cuda.forward(p, (4,), 1e-5)
    labels = torch.tensor([0, 1, 2])
    found.append(SoftmaxCrossEntropyLoss.apply(p, labels, 0.1))
    return [*found, *(t for tensors in lists for t in tensors), *squares]


@OTHERS
def test_functions_compute_alike(dtype):
    assert_same_under(dtype, functions)


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
