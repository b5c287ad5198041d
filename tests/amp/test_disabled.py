"""``amp.initialize(enabled=False)``: every amp call is a no-op."""

import pytest
import torch

import apex.amp as amp
from tests.amp.cases import (
    Net,
    backward,
    loss_of,
    prepared,
    sgd,
    train,
)


@pytest.fixture
def disabled():
    model = Net()
    return amp.initialize(model, sgd(model), enabled=False, opt_level="O2")


def test_disabled_returns_what_it_was_given_unchanged():
    model = Net()
    optimizer = sgd(model)
    facts = type(model), type(optimizer), set(vars(model)), set(vars(optimizer))
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert (type(model), type(optimizer), set(vars(model)), set(vars(optimizer))) == facts
    assert amp.initialize(model, enabled=False) is model
    assert amp.initialize([model], [optimizer], enabled=False) == ([model], [optimizer])


def test_disabled_checks_nothing():
    model = Net().half()
    assert amp.initialize(model, "no optimizer", enabled=False, opt_level="no level")[0] is model


def test_disabled_says_nothing(disabled, capsys):
    assert capsys.readouterr() == ("", "")


def test_disabled_trains_as_without_amp(disabled):
    model, optimizer = disabled
    torch.manual_seed(0)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    steps = sgd(plain)
    losses = []
    for _ in range(3):
        steps.zero_grad()
        loss = loss_of(plain)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert train(model, optimizer) == losses


def test_disabled_scale_loss_gives_the_loss_itself(disabled):
    model, optimizer = disabled
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with amp.scale_loss(loss, [optimizer], loss_id=3, delay_unscale=True) as scaled_loss:
        assert scaled_loss is loss
    with amp.scale_loss(loss, []) as scaled_loss:
        assert scaled_loss is loss


def test_disabled_state_dict_is_empty_and_loading_does_nothing(disabled):
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert amp.state_dict() == {}


def test_disabled_master_params_are_the_parameters(disabled):
    model, optimizer = disabled
    masters = list(amp.master_params(optimizer))
    assert all(a is b for a, b in zip(masters, model.parameters(), strict=True))


def test_disabled_disable_casts_passes(disabled):
    with amp.disable_casts():
        assert loss_of(disabled[0]).dtype is torch.float32


def test_disabled_functions_are_called_plainly(disabled):
    seen = amp.half_function(lambda x: x.dtype)
    assert seen(torch.ones(1)) is torch.float32


def test_disabled_restore_returns_what_it_is_given(disabled):
    model, optimizer = disabled
    assert amp.restore(model, optimizer) == (model, optimizer)
    assert amp.restore(model) is model


def test_disabled_has_no_scalers_and_no_casts(disabled):
    assert len(amp._amp_state.loss_scalers) == 0
    assert not amp._amp_state.handle.is_active()
    assert amp._amp_state.opt_properties.enabled is False


def test_disabling_for_one_model_leaves_another_prepared_one_working():
    model, optimizer = prepared("O2")
    other = Net()
    _, plain = amp.initialize(other, sgd(other), enabled=False)
    backward(loss_of(model), optimizer)
    assert next(amp.master_params(optimizer)).grad is not None
    loss = loss_of(other)
    with amp.scale_loss(loss, plain) as scaled_loss:
        assert scaled_loss is loss


def test_objects_given_with_enabled_false_may_be_prepared_and_restored_later(disabled):
    model, optimizer = disabled
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    train(model, optimizer)
    amp.restore(model, optimizer)
    assert type(model) is Net
    assert type(optimizer) is torch.optim.SGD
