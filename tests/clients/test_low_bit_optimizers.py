"""Optimizers that keep their moments in 8 bits or fewer, unmodified at O5: torchao, bitsandbytes.

torchao compiles its step, which takes minutes on a CPU for the 4-bit one: marked slow.
"""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.clients.libraries import need

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # theirs, of the kernels that a CPU lacks
]

WIDTH = 128  # their least size of a quantized tensor is 4096 elements
CASES = [
    pytest.param("torchao.optim", "AdamW8bit", 8.3, marks=pytest.mark.slow),
    pytest.param("torchao.optim", "AdamW4bit", 7.3, marks=pytest.mark.slow),
    pytest.param("torchao.optim", "AdamWFp8", 8.3, marks=pytest.mark.slow),
    pytest.param("bitsandbytes.optim", "AdamW8bit", 8.3),
]
every_kind = pytest.mark.parametrize(("module", "name", "most"), CASES)


def prepared(module, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = getattr(need(module), name)(model.parameters(), lr=1e-3)
    return amp.initialize(model, optimizer, opt_level="O5", verbosity=0)


def losses(model, optimizer, steps):
    found = []
    for step in steps:
        given = torch.Generator().manual_seed(step % 2)
        x = torch.randn(16, WIDTH, generator=given)
        y = torch.randint(WIDTH, (16,), generator=given)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        found.append(loss.tolist())
    return found


def stored(tensor):
    """Returns the bytes of a tensor, or of those inside a quantized one."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is None or type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor.untyped_storage().nbytes()
    return sum(stored(getattr(tensor, name)) for name in inner()[0])


@every_kind
def test_it_trains_with_fp32_masters_and_small_moments(module, name, most):
    model, optimizer = prepared(module, name)
    found = losses(model, optimizer, range(8))
    assert found[-1] < found[0] - 0.1
    params = list(amp.master_params(optimizer))
    assert {param.dtype for param in params} == {torch.float32}
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    moments = sum(stored(t) for t in state if isinstance(t, torch.Tensor) and t.numel() > 1)
    weights = sum(p.nbytes for p in (*params, *model.parameters()))
    assert (weights + moments) / sum(p.numel() for p in params) < most


@every_kind
def test_a_resumed_run_is_the_uninterrupted_one(module, name, most):
    model, optimizer = prepared(module, name)
    losses(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), amp.state_dict()), file)
    expected = losses(model, optimizer, range(3, 6))
    other, its_optimizer = prepared(module, name)
    file.seek(0)
    of_model, of_optimizer, of_amp = torch.load(file, weights_only=False)
    other.load_state_dict(of_model)
    its_optimizer.load_state_dict(of_optimizer)
    del model
    amp.load_state_dict(of_amp)
    assert losses(other, its_optimizer, range(3, 6)) == expected
    for one, two in zip(
        amp.master_params(optimizer), amp.master_params(its_optimizer), strict=True
    ):
        assert torch.equal(one, two)
