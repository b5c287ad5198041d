"""As keys, and for torch's state dicts by name, a master is its model parameter."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from apex import amp
from tests.support import loops

levels = pytest.mark.parametrize("level", loops.WITH_MASTERS)


@levels
def test_in_dicts_and_sets_a_master_is_its_parameter(level):
    model, optimizer = loops.trained(level, loops.fused_adamw_of)
    params, masters = list(model.parameters()), list(amp.master_params(optimizer))
    names = {param: name for name, param in model.named_parameters()}
    assert [names[master] for master in masters] == list(dict(model.named_parameters()))
    assert set(params) == set(masters)
    assert params[0] in dict.fromkeys(masters)
    assert params[0] in optimizer.state
    for param, master in zip(params, masters, strict=True):
        assert optimizer.state[param] is optimizer.state[master]
        assert (master == master.detach()).all()
        assert not (master == master.detach() + 1).any()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": params[:1]})


@levels
def test_state_of_copies_is_found_by_their_parameters_and_masters(level):
    for copied in (copy.deepcopy, loops.saved_and_loaded):
        model, optimizer = copied(loops.trained(level, loops.fused_adamw_of, loss_scale=8.0))
        for master in optimizer.param_groups[0]["params"]:
            assert optimizer.state[master]["step"] == 2
        assert len(optimizer.state) == 4
        state = get_optimizer_state_dict(model, optimizer)["state"]
        assert [*state] == [name for name, _ in model.named_parameters()]


@levels
def test_data_assigned_to_a_master_reaches_the_model_at_once(level):
    model, optimizer = loops.prepared(level)
    weight = model[0].weight
    master = next(amp.master_params(optimizer))
    master.data = torch.full_like(master, 1 / 3)
    assert torch.equal(weight, torch.full_like(weight, 1 / 3))
