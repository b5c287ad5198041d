"""Optimizers that keep their moments in 8 bits or fewer, unmodified at O5: torchao, bitsandbytes.

torchao compiles its step, which takes minutes on a CPU for the 4-bit one; here it runs eagerly, but
for one test.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.clients.libraries import need
from tests.support.loops import descend, same

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # theirs, of the kernels that a CPU lacks
]

WIDTH = 128  # their least size of a quantized tensor is 4096 elements
CASES = [
    ("torchao.optim", "AdamW8bit", 8.3),
    ("torchao.optim", "AdamW4bit", 7.3),
    ("torchao.optim", "AdamWFp8", 8.3),
    ("bitsandbytes.optim", "AdamW8bit", 8.3),
]
every_kind = pytest.mark.parametrize(("module", "name", "most"), CASES)


@pytest.fixture(autouse=True)
def eager():
    with torch.compiler.set_stance("force_eager"):
        yield


def plain(module, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return model, getattr(need(module), name)(model.parameters(), lr=1e-3)


def prepared_pair(module, name):
    options = {"opt_level": "O5", "verbosity": 0}
    return amp.initialize(*plain(module, name), **options)


def losses(model, optimizer, steps):
    found = []
    for step in steps:
        given = torch.Generator().manual_seed(step % 2)
        x = torch.randn(16, WIDTH, generator=given)
        y = torch.randint(WIDTH, (16,), generator=given)
        loss = F.cross_entropy(model(x), y)
        descend(loss, optimizer)
        found.append(loss.tolist())
    return found


def tensors(state):
    """Yields the plain tensors of a nested state: codes, scales, and what is not quantized."""
    if isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, torch.Tensor):
        inner = getattr(state, "__tensor_flatten__", None)
        if inner is None or type(state) in (torch.Tensor, nn.Parameter):
            yield state
        else:
            for name in inner()[0]:
                yield from tensors(getattr(state, name))


def values(state):
    """Returns copies; torchao's moments cannot be copied themselves."""
    return [tensor.clone() for tensor in tensors(state)]


@every_kind
def test_it_trains_with_fp32_masters_and_small_moments(module, name, most):
    model, optimizer = prepared_pair(module, name)
    found = losses(model, optimizer, range(8))
    assert found[-1] < found[0] - 0.1
    params = list(amp.master_params(optimizer))
    assert {param.dtype for param in params} == {torch.float32}
    moments = sum(t.untyped_storage().nbytes() for t in tensors(dict(optimizer.state)))
    weights = sum(weight.nbytes for weight in (*params, *model.parameters()))
    assert (weights + moments) / sum(p.numel() for p in params) < most


@every_kind
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_initialize_and_restore_leave_codes_and_scales(module, name, most, level):
    """Of a weight; biases are too small to be quantized and follow the level's dtype."""
    model, optimizer = plain(module, name)
    F.cross_entropy(model(torch.randn(4, WIDTH)), torch.arange(4)).backward()
    optimizer.step()
    states = optimizer.state
    before = values(states[model[0].weight])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert same(values(states[optimizer.param_groups[0]["params"][0]]), before)
    amp.restore(model, optimizer)
    assert same(values(states[model[0].weight]), before)
