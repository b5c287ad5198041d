"""``optimizer._amp_stash`` and the private methods of a prepared optimizer."""

import copy

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex.parallel import LARC
from tests.amp.cases import (
    LEVELS,
    Net,
    backward,
    loss_of,
    one_weight,
    prepared,
    sgd,
    slope,
    train,
)

every_level = pytest.mark.parametrize("level", LEVELS)
with_masters = pytest.mark.parametrize("level", ["O2", "O5"])


# -- optimizer._amp_stash --------------------------------------------------------------------


def test_the_stash_is_absent_before_initialize_and_after_restore():
    model = Net()
    optimizer = sgd(model)
    assert not hasattr(optimizer, "_amp_stash")
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert hasattr(optimizer, "_amp_stash")
    amp.restore(model, optimizer)
    assert not hasattr(optimizer, "_amp_stash")


def test_the_stash_is_absent_after_a_disabled_initialize():
    model = Net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, enabled=False)
    assert not hasattr(optimizer, "_amp_stash")


@every_level
def test_the_stash_is_one_object(level):
    _, optimizer = prepared(level)
    stash = optimizer._amp_stash
    stash.mark = 3
    assert optimizer._amp_stash is stash
    assert optimizer._amp_stash.mark == 3


def test_the_stash_is_reached_through_larc():
    model = Net()
    model, larc = amp.initialize(model, LARC(sgd(model)), opt_level="O5", verbosity=0)
    assert larc._amp_stash is larc.optim._amp_stash
    assert not hasattr(LARC(sgd(Net())), "_amp_stash")


@with_masters
def test_the_stash_lists_pairs_in_one_order_and_batch_norm_by_itself(level):
    model, optimizer = prepared(level)
    stash = optimizer._amp_stash
    low = [model.first.weight, model.first.bias, model.last.weight, model.last.bias]
    assert all(a is b for a, b in zip(stash.all_fp16_params, low, strict=True))
    pairs = zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in pairs)
    own = [model.norm.weight, model.norm.bias]
    assert all(a is b for a, b in zip(stash.all_fp32_from_fp32_params, own, strict=True))


@every_level
def test_all_fp32_params_are_what_the_optimizer_steps(level):
    _, optimizer = prepared(level)
    listed = {id(p) for p in optimizer._amp_stash.all_fp32_params}
    assert listed == {id(p) for p in amp.master_params(optimizer)}


@with_masters
def test_the_stash_follows_new_groups(level):
    model, optimizer = prepared(level)
    extra = nn.Parameter(torch.ones(2, dtype=model.first.weight.dtype))
    optimizer.add_param_group({"params": [extra]})
    assert optimizer._amp_stash.all_fp16_params[-1] is extra


def by_groups(level):
    """Returns a model and an optimizer with one group of weights and one of biases."""
    model = Net()
    names = "weight", "bias"
    groups = [
        {"params": [p for name, p in model.named_parameters() if name.endswith(kind)]}
        for kind in names
    ]
    optimizer = torch.optim.SGD(groups, lr=0.125, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@with_masters
def test_the_stash_lists_models_and_masters_by_parameter_group(level):
    model, optimizer = by_groups(level)
    stash = optimizer._amp_stash
    for name, index in (("weight", 0), ("bias", 1)):
        low = [getattr(model.first, name), getattr(model.last, name)]
        assert all(a is b for a, b in zip(stash.fp16_groups[index], low, strict=True))
        own = stash.fp32_from_fp32_groups[index]
        assert all(a is b for a, b in zip(own, [getattr(model.norm, name)], strict=True))
        listed = {id(p) for p in [*stash.fp32_from_fp16_groups[index], *own]}
        assert listed == {id(p) for p in optimizer.param_groups[index]["params"]}
        pairs = zip(stash.fp16_groups[index], stash.fp32_from_fp16_groups[index], strict=True)
        assert all(torch.equal(p, master.to(p.dtype)) for p, master in pairs)


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_the_stash_has_no_groups_without_masters(level):
    _, optimizer = prepared(level)
    for name in ("fp16_groups", "fp32_from_fp16_groups", "fp32_from_fp32_groups"):
        assert not hasattr(optimizer._amp_stash, name)


@with_masters
def test_a_frozen_parameter_is_in_no_list_of_a_group(level):
    model = Net()
    model.norm.weight.requires_grad_(False)
    model.first.weight.requires_grad_(False)
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    stash = optimizer._amp_stash
    listed = [stash.fp16_groups, stash.fp32_from_fp32_groups]
    frozen = {id(model.first.weight), id(model.norm.weight)}
    assert not frozen & {id(p) for groups in listed for group in groups for p in group}


@with_masters
def test_slow_momentum_written_through_the_groups_trains_as_on_fp32(level):
    """SlowMo of fairscale: an outer momentum step on masters, then rounded into the model."""
    model, optimizer = one_weight(level)
    expected = slow = 1.0
    velocity = 0.0
    for value in (1.0, 2.0, 3.0):
        optimizer.zero_grad()
        backward(slope(model, value * 2.0**-6), optimizer)
        optimizer.step()
        expected -= 0.125 * value * 2.0**-6
        velocity = 0.5 * velocity + (slow - expected)
        expected = slow = slow - 0.75 * velocity
        stash = optimizer._amp_stash
        for low, masters in zip(stash.fp16_groups, stash.fp32_from_fp16_groups, strict=True):
            for param, master in zip(low, masters, strict=True):
                master.data.fill_(expected)
                param.data.copy_(master.data)
        assert next(amp.master_params(optimizer)).item() == expected
        assert model.state_dict()["weight"].item() == expected


@with_masters
def test_weights_averaged_in_low_precision_and_copied_to_the_masters_stay(level):
    model, optimizer = one_weight(level)
    backward(slope(model, 2.0**-6), optimizer)
    optimizer.step()
    (param,), (master,) = (
        optimizer._amp_stash.fp16_groups[0],
        optimizer._amp_stash.fp32_from_fp16_groups[0],
    )
    param.data.mul_(0.5)  # not counted by torch
    master.data.copy_(param.data)
    assert model(torch.ones(1, 1)).item() == master.item() == param.item() <= 0.5
    optimizer.zero_grad()
    backward(slope(model, 0.5), optimizer)
    optimizer.step()
    assert 0.4 < model.weight.item() < 0.45


@every_level
def test_params_have_scaled_gradients_between_delayed_passes(level):
    model, optimizer = prepared(level)
    stash = optimizer._amp_stash
    found = [stash.params_have_scaled_gradients]
    for delay in (True, False):
        backward(loss_of(model), optimizer, delay_unscale=delay)
        found.append(stash.params_have_scaled_gradients)
    assert found == [False, True, False]


def test_params_have_scaled_gradients_can_be_set():
    model, optimizer = one_weight("O1", loss_scale=8.0)
    model.weight.grad = torch.full((1, 1), 16.0)  # scaled, by a backward pass of the script's own
    optimizer._amp_stash.params_have_scaled_gradients = True
    backward(slope(model, 1.0), optimizer)
    assert model.weight.grad == 3.0


def test_flags_of_the_stash_can_be_set():
    _, optimizer = prepared("O2")
    for name in ("lazy_init_called", "already_patched"):
        for value in (False, True):
            setattr(optimizer._amp_stash, name, value)
            assert getattr(optimizer._amp_stash, name) is value


# -- the optimizer's private methods ---------------------------------------------------------


@every_level
def test_lazy_init_may_be_called_at_any_time_and_changes_nothing(level):
    model, optimizer = prepared(level)
    before = [id(p) for p in amp.master_params(optimizer)]
    for _ in range(2):
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_lazy_init()
        assert optimizer._amp_stash.lazy_init_called
        train(model, optimizer, steps=1)
    assert [id(p) for p in amp.master_params(optimizer)] == before


@with_masters
def test_master_params_to_model_params_rounds_masters_into_the_model(level):
    model, optimizer = one_weight(level)
    with torch.no_grad():
        next(amp.master_params(optimizer)).fill_(0.1)
    optimizer._master_params_to_model_params()
    assert model.weight == torch.tensor(0.1).to(model.weight.dtype)


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_master_params_to_model_params_does_nothing_without_masters(level):
    model, optimizer = one_weight(level)
    optimizer._master_params_to_model_params()
    assert model.weight == 1.0


@every_level
@pytest.mark.parametrize("given", [8.0, "dynamic"])
def test_prepare_and_post_backward_unscale_as_scale_loss_does(level, given):
    model, optimizer = one_weight(level, loss_scale=given)
    backward(slope(model, 0.25), optimizer)
    scaler = amp._amp_state.loss_scalers[0]
    scaler.clear_overflow_state()
    optimizer._prepare_amp_backward()
    (slope(model, 0.5) * scaler.loss_scale()).backward()
    optimizer._post_amp_backward(scaler)
    assert [p.grad.item() for p in amp.master_params(optimizer)] == [0.75]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_post_backward_makes_an_overflow_skip_the_step(level):
    model, optimizer = one_weight(level)
    scaler = amp._amp_state.loss_scalers[0]
    optimizer._prepare_amp_backward()
    slope(model, torch.inf).backward()
    optimizer._post_amp_backward(scaler)
    assert scaler.update_scale() is True
    optimizer.step()
    assert model.weight == 1.0


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_the_resume_idiom_of_bert_scripts_continues_bit_for_bit(level):
    model, optimizer = prepared(level, optimizer=adam)
    train(model, optimizer)
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "master params": list(amp.master_params(optimizer)),
        "amp": amp.state_dict(),
    }
    saved = copy.deepcopy(saved)
    expected = train(model, optimizer)
    del model, optimizer

    model, optimizer = prepared(level, optimizer=adam)
    model.load_state_dict(saved["model"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved["optimizer"])
    for param, kept in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        param.data.copy_(kept.data)
    amp.load_state_dict(saved["amp"])
    assert train(model, optimizer) == expected


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=2**-6)
