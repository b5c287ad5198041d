"""The scales of one optimizer, where several sessions live."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.integrations import scales
from apex.parallel import LARC
from tests.support.loops import prepared


def test_the_scales_are_those_of_the_optimizers_own_session():
    first, second = prepared("O5", loss_scale=4.0), prepared("O5", loss_scale=8.0, num_losses=2)
    assert [each["loss_scale"] for each in scales.state_dict(first[1]).values()] == [4.0]
    assert [each["loss_scale"] for each in scales.state_dict(second[1]).values()] == [8.0, 8.0]


def test_loading_changes_no_other_session():
    first, second = prepared("O5", loss_scale="dynamic"), prepared("O5", loss_scale="dynamic")
    scales.load_state_dict(second[1], {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 5}})
    assert scales.state_dict(first[1])["loss_scaler0"]["loss_scale"] == 2.0**16
    assert scales.state_dict(second[1])["loss_scaler0"] == {"loss_scale": 2.0, "unskipped": 5}


def test_another_number_of_scales_warns_and_loads_what_fits():
    model, optimizer = prepared("O5", loss_scale="dynamic", num_losses=2)
    with pytest.warns(UserWarning, match="got 1 loss scalers, but amp has 2"):
        scales.load_state_dict(optimizer, {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    loaded = [each["loss_scale"] for each in scales.state_dict(optimizer).values()]
    assert loaded == [2.0, 2.0**16]
    del model


def test_larc_stands_for_the_optimizer_inside():
    model = nn.Linear(2, 1)
    larc = LARC(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not scales.is_prepared(larc)
    model, larc = amp.initialize(model, larc, opt_level="O5", verbosity=0)
    assert scales.is_prepared(larc)
    assert [*scales.state_dict(larc)] == ["loss_scaler0"]
