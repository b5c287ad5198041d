"""A checkpoint goes on at another level, with amp off, or with other losses, as far as it can."""

import itertools
import warnings

import pytest
import torch

from apex import amp
from apex.optimizers import FusedLAMB
from tests.training import cases

OFF = "off"
DYNAMIC = ("O1", "O2")
OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
}
PAIRS = list(itertools.permutations((*cases.LEVELS, OFF), 2))


def prepare(level, model, optimizer, **options):
    options = {"verbosity": 0, **options}
    if level == OFF:
        return amp.initialize(model, optimizer, enabled=False)
    return amp.initialize(model, optimizer, opt_level=level, **options)


def save_at(level, name):
    model = cases.net()
    model, optimizer = prepare(level, model, OPTIMIZERS[name](model.parameters()))
    for x, y in cases.batches(3, overflow_at={1} if level in DYNAMIC else ()):
        cases.train_step(model, optimizer, x, y)
    return [part.state_dict() for part in (model, optimizer, amp)]


@pytest.fixture(scope="module")
def saved():
    """What every level saved, by level and optimizer."""
    return {(lv, name): save_at(lv, name) for lv in (*cases.LEVELS, OFF) for name in OPTIMIZERS}


def resume_at(level, name, states, *, load_first):
    model = cases.net(seed=5)
    optimizer = OPTIMIZERS[name](model.parameters())
    parts = (model, optimizer, amp)
    if not load_first:
        prepare(level, *parts[:2])
    for part, state in zip(parts, states, strict=True):
        # amp.state_dict() of a run without amp is empty: nothing to load, nothing to wait.
        if state or part is not amp:
            part.load_state_dict(state)
    if load_first:
        prepare(level, *parts[:2])
    return model, optimizer


@pytest.mark.parametrize("load_first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("before", "now"), PAIRS)
def test_weights_and_state_are_the_saved_ones_in_the_dtypes_of_the_level(
    saved, before, now, name, load_first
):
    model_state, optimizer_state, _ = states = saved[before, name]
    model, optimizer = resume_at(now, name, states, load_first=load_first)
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    assert {p.dtype for p in stepped} == {torch.float16 if now == "O3" else torch.float32}
    expected = [value.to(stepped[0].dtype) for value in model_state.values()]
    assert cases.same(expected, cases.values(stepped))
    for param, value in zip(model.parameters(), model_state.values(), strict=True):
        assert torch.equal(param, value.to(param.dtype))

    # Fused optimizers of this package keep fp32 state; torch's have the parameters' dtype.
    state_dtype = torch.float32 if name == "FusedLAMB" else stepped[0].dtype
    for index, param in enumerate(stepped):
        old = optimizer_state["state"][index]
        assert optimizer.state[param].keys() == old.keys()
        for key, value in optimizer.state[param].items():
            wanted = old[key] if value.dim() == 0 else old[key].to(state_dtype)
            assert cases.same(wanted, value), key


@pytest.mark.parametrize("load_first", [True, False])
@pytest.mark.parametrize(("before", "now"), PAIRS)
def test_a_scale_is_taken_where_it_means_the_same_and_told_where_it_does_not(
    saved, before, now, load_first, caplog
):
    keep = resume_at(now, "SGD", saved[before, "SGD"], load_first=load_first)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    state = saved[before, "SGD"][2]
    if OFF in (before, now):
        assert not told
    elif (before in DYNAMIC) is (now in DYNAMIC):
        assert amp.state_dict() == state
        assert not told
    else:
        fresh = 2.0**16 if now in DYNAMIC else 1.0
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == fresh
        assert len(told) == 1
        assert told[0].startswith("amp skipped loss_scaler0: ")
    del keep


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("before", "now"), PAIRS)
def test_training_goes_on_without_a_warning(saved, before, now, name):
    model, optimizer = resume_at(now, name, saved[before, name], load_first=False)
    start = cases.values(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in cases.batches(2, seed=3):
            cases.train_step(model, optimizer, x, y)
    end = cases.values(model.parameters())
    assert all(value.isfinite().all() for value in end)
    assert not cases.same(start, end)


def test_there_and_back_by_a_level_with_masters_loses_nothing(saved):
    states = saved["O1", "fused AdamW"]
    for level in ("O5", "O2", OFF, "O4"):
        model, optimizer = resume_at(level, "fused AdamW", states, load_first=False)
        states = [model.state_dict(), optimizer.state_dict(), {}]
        del model, optimizer
    first = saved["O1", "fused AdamW"]
    assert cases.same(dict(first[0]), dict(states[0]))
    assert cases.same(first[1]["state"], states[1]["state"])


def test_an_empty_state_into_scalers_warns_that_none_is_loaded():
    keep = cases.prepared("O1")
    with pytest.warns(UserWarning, match="got 0 loss scalers, but amp has 1.*amp disabled.*kept"):
        amp.load_state_dict({})
    del keep


def test_loading_with_amp_off_is_told_to_those_who_listen_to_info_only(caplog):
    caplog.set_level("INFO", logger="apex")
    model = cases.net()
    prepare(OFF, model, cases.sgd(model.parameters()))
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert [record.levelname for record in caplog.records] == ["INFO"]
