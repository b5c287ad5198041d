"""``state_dict`` and ``load_state_dict`` of the wrapper, alone and in an ``OptimWrapperDict``."""

import copy

import pytest
from torch.testing import assert_close

from tests.package.mmengine_cases import (
    LEVELS,
    WRAPPER_IDS,
    WRAPPERS,
    Ours,
    Theirs,
    iterate,
    net,
    overflow,
    scale,
    sgd,
    values,
    wrapped,
)

pytestmark = pytest.mark.clients

both_kinds = pytest.mark.parametrize("kind", WRAPPERS, ids=WRAPPER_IDS)
all_levels = pytest.mark.parametrize("level", LEVELS)
EXACT = {"rtol": 0, "atol": 0}


def uninterrupted(kind, level, before, after):
    """Returns a checkpoint in the middle of a training with an overflow, and its end.

    Its session ends here: MMEngine's wrapper saves and loads the scales of all that live.
    """
    model, wrapper = wrapped(kind, level, loss_scale="dynamic")
    iterate(model, wrapper, before)
    overflow(model, wrapper)
    checkpoint = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
    iterate(model, wrapper, after)
    return checkpoint, (values(wrapper), model.state_dict(), scale(wrapper))


@both_kinds
@all_levels
@pytest.mark.parametrize("when", ["before the first iteration", "after it"])
def test_training_goes_on_exactly_from_a_checkpoint(kind, level, when):
    (weights, state), end = uninterrupted(kind, level, range(2), range(2, 4))
    model, wrapper = wrapped(kind, level, model=net(seed=1), loss_scale="dynamic")
    if when == "after it":
        iterate(model, wrapper, [7])
    model.load_state_dict(weights)
    wrapper.load_state_dict(state)
    iterate(model, wrapper, range(2, 4))
    assert_close((values(wrapper), model.state_dict(), scale(wrapper)), end, **EXACT)
    assert scale(wrapper) < 2.0**16


@pytest.mark.parametrize(("first", "second"), [(Ours, Theirs), (Theirs, Ours)])
def test_a_checkpoint_of_one_class_goes_on_in_the_other(first, second):
    (weights, state), end = uninterrupted(first, "O5", [0], [1])
    model, wrapper = wrapped(second, "O5", model=net(seed=1), loss_scale="dynamic")
    model.load_state_dict(weights)
    wrapper.load_state_dict(state)
    iterate(model, wrapper, [1])
    assert_close((values(wrapper), model.state_dict(), scale(wrapper)), end, **EXACT)
    assert scale(wrapper) == 2.0**15


def test_a_plain_checkpoint_leaves_the_scales_as_they_are():
    model, wrapper = wrapped(Ours, "O5", loss_scale="dynamic")
    overflow(model, wrapper)
    wrapper.load_state_dict(sgd(net()).state_dict())
    assert scale(wrapper) == 2.0**15


@pytest.mark.parametrize("prepared", [False, True])
def test_scales_that_make_no_sense_are_refused_before_anything_changes(prepared):
    model, wrapper = wrapped(Ours, "O5")
    if prepared:
        iterate(model, wrapper)
    state = wrapper.state_dict()
    state["param_groups"][0]["lr"] = 99.0
    state["apex_amp"] = {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}
    with pytest.raises(RuntimeError, match=r"loss_scaler0\['loss_scale'\] is 0.0"):
        wrapper.load_state_dict(state)
    assert wrapper.get_lr() == {"lr": [0.125]}


# -- OptimWrapperDict ------------------------------------------------------------------------


def pair(kind, level, seed=0):
    """Two nets, each with its own wrapper, in MMEngine's container."""
    from mmengine.optim import OptimWrapperDict

    nets = [net(seed), net(seed + 10)]
    wrappers = [wrapped(kind, level, model=each, loss_scale="dynamic")[1] for each in nets]
    return nets, OptimWrapperDict(generator=wrappers[0], discriminator=wrappers[1])


def iterate_pair(nets, wrappers, steps):
    for step in steps:
        for model, wrapper in zip(nets, wrappers.values(), strict=True):
            iterate(model, wrapper, [step])


@all_levels
def test_wrappers_of_a_dict_resume_each_with_its_own_scale(level):
    nets, wrappers = pair(Ours, level)
    iterate_pair(nets, wrappers, [0])
    overflow(nets[1], wrappers["discriminator"])
    weights = copy.deepcopy([each.state_dict() for each in nets])
    state = copy.deepcopy(wrappers.state_dict())
    iterate_pair(nets, wrappers, [1, 2])

    new_nets, new = pair(Ours, level, seed=1)
    for each, own in zip(new_nets, weights, strict=True):
        each.load_state_dict(own)
    new.load_state_dict(state)
    iterate_pair(new_nets, new, [1, 2])
    scales = [scale(each) for each in new.values()]
    assert scales == [scale(each) for each in wrappers.values()]
    assert scales[0] > scales[1]
    for name, wrapper in wrappers.items():
        assert_close(values(new[name]), values(wrapper), **EXACT)
