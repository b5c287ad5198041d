"""``amp.initialize(enabled=False)``: every amp call is a no-op."""

import pytest
import torch

from apex import amp
from tests.support import loops


def plain(level="O2", **options):
    model, optimizer = loops.plain_pair()
    return amp.initialize(model, optimizer, opt_level=level, enabled=False, **options)


def test_what_was_given_comes_back_unchanged_and_unchecked(capsys):
    model, optimizer = loops.plain_pair()
    facts = type(model), type(optimizer), set(vars(model)), set(vars(optimizer))
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    assert amp.initialize([model], [optimizer], enabled=False) == ([model], [optimizer])
    assert amp.initialize(model, "no optimizer", enabled=False, opt_level="no level")[0] is model
    assert amp.restore(model, optimizer) == (model, optimizer)
    assert amp.restore(model) is model
    assert (type(model), type(optimizer), set(vars(model)), set(vars(optimizer))) == facts
    assert capsys.readouterr() == ("", "")


def test_every_call_passes_through_and_it_trains_as_without_amp():
    model, optimizer = plain()
    other, steps = loops.plain_pair()
    for x, y in loops.batches(3):
        loops.train_step(model, optimizer, x, y)
        loops.plain_step(other, steps, x, y)
    assert loops.same(loops.values(model.parameters()), loops.values(other.parameters()))
    loss = loops.loss_of(model, *loops.batch())
    for given, options in ((optimizer, {}), ([optimizer], {"loss_id": 3}), ([], {})):
        with amp.scale_loss(loss, given, **options) as scaled_loss:
            assert scaled_loss is loss
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert amp.state_dict() == {}
    assert all(map(lambda a, b: a is b, amp.master_params(optimizer), model.parameters()))
    with amp.disable_casts():
        assert model(torch.ones(1, 4)).dtype is torch.float32
    assert amp.half_function(lambda x: x.dtype)(torch.ones(1)) is torch.float32
    assert len(amp._amp_state.loss_scalers) == 0
    assert not amp._amp_state.handle.is_active()
    assert amp._amp_state.opt_properties.enabled is False


def test_a_prepared_model_beside_a_disabled_one_works():
    model, optimizer = loops.prepared("O2")
    other, disabled = plain()
    loops.backward(model, optimizer, *loops.batch())
    assert next(amp.master_params(optimizer)).grad is not None
    loss = loops.loss_of(other, *loops.batch())
    with amp.scale_loss(loss, disabled) as scaled_loss:
        assert scaled_loss is loss
    amp.initialize(other, disabled, opt_level="O5", verbosity=0)
    loops.train_step(other, disabled, *loops.batch())
    amp.restore(other, disabled)
    assert (type(other), type(disabled)) == (torch.nn.Sequential, torch.optim.SGD)


def test_enabled_set_to_false_by_a_script_passes_the_loss_through():
    model, optimizer = loops.prepared("O2")
    loss = loops.loss_of(model, *loops.batch())
    for enabled in (False, True):
        amp._amp_state.opt_properties.enabled = enabled
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert (scaled_loss is loss) is not enabled


def test_casts_of_an_earlier_call_that_stay_on_are_told():
    model, optimizer = loops.prepared("O4")
    with pytest.warns(UserWarning, match="computes in 16 bits, too.*amp.restore") as told:
        other, _ = plain("O4")
    assert told[0].filename == __file__
    assert other(torch.ones(1, 4)).dtype is torch.bfloat16
    amp.restore(model, optimizer)
    third, _ = plain("O4")  # and no warning
    assert third(torch.ones(1, 4)).dtype is torch.float32
