"""MMEngine's Runner with the wrapper from a config file: training, checkpoints, resume."""

import gc

import pytest
import torch
from torch.testing import assert_close

from tests.package.mmengine_cases import Ours, Theirs, scale
from tests.package.mmengine_runs import runner, write_configs

BY_SCOPE = "apex.ApexOptimWrapper"
BY_PATH = "apex.integrations.mmengine.ApexOptimWrapper"
BY_NAME = "ApexOptimWrapper"

pytestmark = [
    pytest.mark.clients,
    # MMEngine's checkpoints hold its log history, which torch.load refuses by default.
    pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"),
]


@pytest.fixture(autouse=True)
def whole_checkpoints(monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@pytest.mark.parametrize(("name", "kind"), [(BY_SCOPE, Ours), (BY_PATH, Ours), (BY_NAME, Theirs)])
def test_the_registry_finds_both_classes_by_their_names(name, kind):
    from mmengine.registry import OPTIM_WRAPPERS

    assert OPTIM_WRAPPERS.get(name) is kind


@pytest.mark.parametrize(
    ("name", "level"), [(BY_SCOPE, "O1"), (BY_SCOPE, "O2"), (BY_PATH, "O5"), (BY_NAME, "O5")]
)
def test_a_resumed_run_ends_as_an_uninterrupted_one_and_saves_fp32(name, level, tmp_path):
    config = write_configs(tmp_path, name, level)
    whole = runner(config, tmp_path / "whole")
    whole.train()
    weights, end = whole.model.state_dict(), scale(whole.optim_wrapper)
    saved = torch.load(tmp_path / "whole/epoch_3.pth", weights_only=False)
    floating = [value for value in saved["state_dict"].values() if value.is_floating_point()]
    assert {value.dtype for value in floating} == {torch.float32}
    assert saved["optimizer"]["apex_amp"] == whole.optim_wrapper.state_dict()["apex_amp"]
    del whole  # and its session: MMEngine's own wrapper loads the scales of all that live
    gc.collect()

    # Not epoch 1: its three iterations end in the middle of two that accumulate.
    checkpoint = str(tmp_path / "whole" / "epoch_2.pth")
    resumed = runner(config, tmp_path / "resumed", load_from=checkpoint, resume=True)
    resumed.train()
    assert resumed.optim_wrapper.inner_count == 9
    assert_close(resumed.model.state_dict(), weights, rtol=0, atol=0)
    assert scale(resumed.optim_wrapper) == end
