"""Under another default dtype nothing changes but the dtype of new parameters."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch

import apex
from apex import RNN, amp
from apex.contrib.layer_norm import FastLayerNorm
from apex.fused_dense import FusedDenseGeluDense
from apex.mlp import MLP
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.parallel import SyncBatchNorm
from apex.reparameterization import apply_weight_norm
from tests.support import loops
from tests.support import optimizers as cases

FP32 = torch.float32
others = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])


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
    assert loops.same(found, expected)


FUSED = {
    "torch's AdamW": loops.fused_adamw_of,
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
}


@others
@pytest.mark.parametrize("level", loops.LEVELS)
def test_training_at_a_level_is_the_same(level, dtype):
    for make in FUSED.values():
        model, data = loops.net(), list(loops.batches(4, overflow_at={1}))
        start = loops.values(model.parameters())

        def run(model=model, data=data, start=start, make=make):
            loops.change(model.parameters(), start, "data")
            scale = "dynamic" if level in ("O1", "O2") else 8.0
            options = {"opt_level": level, "verbosity": 0, "loss_scale": scale}
            _, optimizer = amp.initialize(model, make(model.parameters()), **options)
            found = []
            for x, y in data:
                found.append(loops.backward(model, optimizer, x, y))
                found.append(amp.clip_grad_norm_(optimizer, 1.0))
                optimizer.step()
                optimizer.zero_grad()
            found += [amp.step_was_skipped(optimizer), loops.masters(optimizer)]
            found += [optimizer.state_dict()["state"], amp.state_dict()]
            found.append(loops.values(model.parameters()))
            amp.restore(model, optimizer)
            return found

        assert_same_under(dtype, run)


@others
@pytest.mark.parametrize("name", cases.MAKERS)
def test_optimizers_step_alike(name, dtype):
    flags = [None, torch.zeros(()), torch.ones(())]
    params, grads = cases.parameters(), [cases.gradients(cases.parameters(), i) for i in range(3)]

    def run():
        found = []
        for flag in flags:
            own = [torch.nn.Parameter(param.detach().clone()) for param in params]
            optimizer = cases.MAKERS[name](own)
            if flag is not None:
                optimizer.found_inf, optimizer.grad_scale = flag, torch.full((), 2.0, dtype=FP32)
            for each in grads:
                cases.give(own, each)
                optimizer.step()
            found += [*loops.values(own), optimizer.state_dict()["state"]]
        return found

    assert_same_under(dtype, run)


MODULES = {
    "FusedLayerNorm": lambda: FusedLayerNorm(8),
    "FusedRMSNorm": lambda: FusedRMSNorm(8, elementwise_affine=False),
    "FastLayerNorm": lambda: FastLayerNorm(8),
    "SyncBatchNorm": lambda: SyncBatchNorm(8),
    "MLP": lambda: MLP([8, 4]),
    "FusedDenseGeluDense": lambda: FusedDenseGeluDense(8, 6, 4),
    "LSTM": lambda: RNN.LSTM(8, 4, 1),
    "mLSTM": lambda: RNN.mLSTM(8, 4, 1, output_size=2),
    "weight norm": lambda: apply_weight_norm(torch.nn.Linear(8, 4)),
}


@others
@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_alike_in_the_dtype_of_their_parameters(name, dtype):
    module = MODULES[name]()  # with fp32 parameters
    x = torch.randn(*((5, 3, 8) if "LSTM" in name else (6, 8)))

    def run():
        if "LSTM" in name:
            module.reset_hidden(3)
        module.zero_grad()
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in module.parameters())]

    assert_same_under(dtype, run)


MAKERS = {"full", "zeros", "ones", "empty", "tensor", "arange", "as_tensor", "linspace", "eye"}
MAKERS |= {"rand", "randn", "scalar_tensor", "empty_strided", "asarray", "logspace"}


def test_every_new_tensor_that_is_no_parameter_states_dtype_and_device():
    source, found = Path(apex.__file__).parents[1], []
    for path in source.rglob("*.py"):
        calls = [
            each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)
        ]
        params = [call for call in calls if ast.unparse(call.func).endswith("nn.Parameter")]
        made = {id(each) for param in params for each in ast.walk(param)}
        for call in calls:
            owner, _, name = ast.unparse(call.func).rpartition(".")
            stated = {keyword.arg for keyword in call.keywords}
            states = {"dtype", "device"} <= stated or id(call) in made
            if owner == "torch" and name in MAKERS and not states:
                found.append(f"{path.relative_to(source)}: {ast.unparse(call)}")
    assert found == []
