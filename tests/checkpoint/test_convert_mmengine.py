"""Checkpoints of MMEngine's own ``ApexOptimWrapper`` and of ours go on in a plain loop of amp."""

import copy

import pytest

from apex import amp
from apex.amp.checkpoint import Converted, convert
from tests.integrations import mmengine_cases as mmengine
from tests.training import cases

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("kind", mmengine.WRAPPERS, ids=mmengine.WRAPPER_IDS)
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_wrapper_s_checkpoint_goes_on_in_a_plain_loop_bit_for_bit(kind, level):
    model, wrapper = mmengine.wrapped(kind, level, loss_scale="dynamic")
    mmengine.iterate(model, wrapper)
    parts = {"state_dict": model.state_dict(), "optimizer": wrapper.state_dict()}
    checkpoint = copy.deepcopy(parts)
    mmengine.iterate(model, wrapper, [7])
    expected, scales = cases.masters(wrapper.optimizer), wrapper.state_dict()["apex_amp"]
    del model, wrapper

    model = mmengine.net(seed=5)
    optimizer = mmengine.sgd(model)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for part, form in ((model, "weights"), (optimizer, "optimizer"), (amp, "amp")):
        converted = convert(checkpoint, to=form)
        assert converted.lost == ()
        part.load_state_dict(converted.state)
    optimizer.zero_grad()
    with amp.scale_loss(mmengine.loss_of(model, mmengine.batch(7)), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert cases.same(expected, cases.masters(optimizer))
    assert convert({"apex_amp": scales}, to="amp") == Converted(dict(amp.state_dict()))
