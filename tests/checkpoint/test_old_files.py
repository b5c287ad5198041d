"""Files of whole objects that the release before this one wrote."""

from pathlib import Path

import pytest
import torch

from apex import amp
from tests.checkpoint import old_model

FILE = Path(__file__).parent / "data/release_0_1.pt"


@pytest.fixture
def saved(request):
    return torch.load(FILE, weights_only=False)[request.param]


@pytest.mark.parametrize("saved", old_model.LEVELS, indirect=True)
def test_a_model_computes_what_it_did(saved):
    model, _ = saved["pair"]
    output = model.eval()(old_model.batch())
    torch.testing.assert_close(output.float(), saved["output"].float(), rtol=0.02, atol=0.02)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.float(), saved["state"][name].float(), rtol=0.01, atol=0)


@pytest.mark.parametrize("saved", ["O2", "O5"], indirect=True)
def test_a_pair_is_restored_with_its_masters(saved):
    model, optimizer = amp.restore(*saved["pair"])
    params = optimizer.param_groups[0]["params"]
    assert all(map(torch.equal, params, saved["masters"]))
    assert type(model) is old_model.Old
    assert params[0] is model.embed.weight is model.head.weight
    old_model.step_plain(model, optimizer)
    assert model.state_dict()["scale"].dtype is torch.float32


@pytest.mark.parametrize("saved", ["O2", "O3", "O5"], indirect=True)
def test_a_part_saves_fp32(saved):
    part = saved["part"]
    assert part.weight.dtype in (torch.float16, torch.bfloat16)
    assert part.state_dict()["weight"].dtype is torch.float32


@pytest.mark.parametrize("saved", ["O0", "O1", "O4"], indirect=True)
def test_where_no_weights_are_cast_the_model_is_plain(saved):
    model, _ = saved["pair"]
    assert type(model) is old_model.Old
    assert all(param.dtype is torch.float32 for param in model.parameters())
