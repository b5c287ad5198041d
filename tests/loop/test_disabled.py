"""``amp.initialize(enabled=False)``: every amp call is a no-op."""

import pytest
import torch

import apex.amp as amp
from tests.support.steps import Net, backward, loss_of, prepared, sgd, train


@pytest.fixture
def disabled():
    model = Net()
    return amp.initialize(model, sgd(model), enabled=False, opt_level="O2")


def test_what_was_given_comes_back_unchanged_and_unchecked(capsys):
    model = Net()
    optimizer = sgd(model)
    facts = type(model), type(optimizer), set(vars(model)), set(vars(optimizer))
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    assert amp.initialize([model], [optimizer], enabled=False) == ([model], [optimizer])
    assert amp.initialize(model, "no optimizer", enabled=False, opt_level="no level")[0] is model
    assert amp.restore(model, optimizer) == (model, optimizer)
    assert amp.restore(model) is model
    assert (type(model), type(optimizer), set(vars(model)), set(vars(optimizer))) == facts
    assert capsys.readouterr() == ("", "")


def test_it_trains_as_without_amp(disabled):
    model, optimizer = disabled
    plain = Net()
    plain.load_state_dict(model.state_dict())
    steps, losses = sgd(plain), []
    for _ in range(3):
        steps.zero_grad()
        loss = loss_of(plain)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert train(model, optimizer) == losses


def test_every_call_passes_through(disabled):
    model, optimizer = disabled
    loss = loss_of(model)
    for given, options in ((optimizer, {}), ([optimizer], {"loss_id": 3}), ([], {})):
        with amp.scale_loss(loss, given, **options) as scaled_loss:
            assert scaled_loss is loss
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert amp.state_dict() == {}
    assert all(map(lambda a, b: a is b, amp.master_params(optimizer), model.parameters()))
    with amp.disable_casts():
        assert loss_of(model).dtype is torch.float32
    assert amp.half_function(lambda x: x.dtype)(torch.ones(1)) is torch.float32
    assert len(amp._amp_state.loss_scalers) == 0
    assert not amp._amp_state.handle.is_active()
    assert amp._amp_state.opt_properties.enabled is False


def test_a_prepared_model_beside_a_disabled_one_works():
    model, optimizer = prepared("O2")
    other = Net()
    _, plain = amp.initialize(other, sgd(other), enabled=False)
    backward(loss_of(model), optimizer)
    assert next(amp.master_params(optimizer)).grad is not None
    loss = loss_of(other)
    with amp.scale_loss(loss, plain) as scaled_loss:
        assert scaled_loss is loss
    amp.initialize(other, plain, opt_level="O5", verbosity=0)
    train(other, plain)
    amp.restore(other, plain)
    assert (type(other), type(plain)) == (Net, torch.optim.SGD)


def test_enabled_set_to_false_by_a_script_passes_the_loss_through():
    model, optimizer = prepared("O2")
    loss = loss_of(model)
    for enabled in (False, True):
        amp._amp_state.opt_properties.enabled = enabled
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert (scaled_loss is loss) is not enabled
