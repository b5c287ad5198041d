"""``amp.checkpoint.convert``: what it knows, what comes out, and what it says is lost."""

import copy

import pytest
import torch
from torch import nn

from apex import amp, fp16_utils, optimizers
from apex.amp.checkpoint import Converted, convert
from apex.contrib import optimizers as contrib_optimizers
from apex.optimizers import FusedAdam
from tests.checkpoint import apex_2019
from tests.training import cases

SCALER = {
    "scale": 512.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}
ENTRY = {"loss_scale": 512.0, "unskipped": 7}


# -- GradScaler ------------------------------------------------------------------------------


def test_a_grad_scaler_s_state_goes_to_amp_and_back():
    there = convert(SCALER, to="amp")
    assert there == Converted({"loss_scaler0": ENTRY})
    assert convert(there.state, to="grad_scaler") == Converted(SCALER)


def test_amp_s_state_goes_to_a_grad_scaler_and_back():
    keep = cases.prepared("O1")
    amp.load_state_dict({"loss_scaler0": ENTRY})
    state = amp.state_dict()
    there = convert(state, to="grad_scaler")
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(there.state)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (512.0, 2000)
    assert convert(scaler.state_dict(), to="amp") == Converted(dict(state))
    del keep


def test_a_converted_grad_scaler_goes_on_in_amp_as_it_would_have():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    weight = nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        scaler.scale((weight * 2).sum()).backward()
        scaler.step(plain)
        scaler.update()
    model, optimizer = cases.prepared("O4", loss_scale="dynamic", growth_interval=4)
    amp.load_state_dict(convert(scaler.state_dict(), to="amp").state)
    cases.train_step(model, optimizer, *cases.batch())
    assert cases.loss_scale() == 16.0


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_how_a_grad_scaler_moves_is_lost_where_amp_moves_otherwise(name):
    given = {**SCALER, name: {"growth_factor": 4.0, "backoff_factor": 0.25}.get(name, 100)}
    converted = convert(given, to="amp")
    assert converted.state == {"loss_scaler0": ENTRY}
    assert converted.lost == (f"{name} is {given[name]:g}: pass it to amp.initialize.",)
    assert convert(given, to="grad_scaler") == Converted(given)


def test_further_and_static_scales_are_lost_in_a_grad_scaler():
    keep = cases.prepared("O5", num_losses=2)
    converted = convert(amp.state_dict(), to="grad_scaler")
    assert converted.state["scale"] == 1.0
    assert converted.lost == (
        "loss_scaler1: a GradScaler has one scale.",
        "loss_scaler0 is static: a GradScaler's scale is dynamic.",
    )
    del keep


def test_a_state_without_a_scale_is_that_of_a_disabled_scaler():
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert (
        convert({}, to="grad_scaler") == convert(disabled.state_dict(), to="amp") == Converted({})
    )
    disabled.load_state_dict(convert({}, to="grad_scaler").state)


def test_amp_s_own_state_stays_as_it_is():
    keep = cases.prepared("O5"), cases.prepared("O1", num_losses=2)
    assert convert(amp.state_dict(), to="amp") == Converted(dict(amp.state_dict()))
    del keep


# -- FP16_Optimizer --------------------------------------------------------------------------


def half_net():
    return cases.net().half()


def adam(params):
    return torch.optim.Adam(params, lr=1e-2, eps=1e-4)


def old_run(wrapper, steps=3, **options):
    model = half_net()
    optimizer = wrapper(adam(model.parameters()), verbose=False, **options)
    for x, y in cases.batches(steps, overflow_at={0} if options else ()):
        optimizer.zero_grad()
        optimizer.backward(cases.loss_of(model, x.half(), y))
        optimizer.step()
    return model, optimizer


WRAPPERS = {
    "2018": fp16_utils.FP16_Optimizer,
    "2019": optimizers.FP16_Optimizer,
    "contrib": contrib_optimizers.FP16_Optimizer,
}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS.keys())


def checkpoint_of(model, optimizer):
    return {"epoch": 3, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}


def masters_of(optimizer):
    return [param for group in optimizer.optimizer.param_groups for param in group["params"]]


@each_wrapper
def test_an_old_run_s_weights_are_its_masters(wrapper):
    model, optimizer = old_run(wrapper)
    converted = convert(checkpoint_of(model, optimizer), to="weights")
    assert converted.lost == ()
    assert list(converted.state) == list(model.state_dict())
    assert cases.same(list(converted.state.values()), masters_of(optimizer))


@each_wrapper
def test_an_old_run_goes_on_at_o2_with_weights_moments_and_scale(wrapper):
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0}}
    model, optimizer = old_run(wrapper, **options)
    old = copy.deepcopy(checkpoint_of(model, optimizer))
    new_model, new = cases.prepared("O2", adam, model=cases.net(seed=5))
    new_model.load_state_dict(convert(old, to="weights").state)
    new.load_state_dict(convert(old, to="optimizer").state)
    amp.load_state_dict(convert(old, to="amp").state)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 2}}
    x, y = cases.batch(seed=3)
    optimizer.zero_grad()
    optimizer.backward(cases.loss_of(model, x.half(), y))
    optimizer.step()
    cases.train_step(new_model, new, x, y)
    assert cases.same(list(map(torch.Tensor.detach, masters_of(optimizer))), cases.masters(new))
    assert cases.same(cases.values(model.parameters()), cases.values(new_model.parameters()))


@each_wrapper
def test_a_static_scale_stays_static(wrapper):
    _, optimizer = old_run(wrapper, static_loss_scale=8.0)
    entry = convert(optimizer.state_dict(), to="amp").state["loss_scaler0"]
    assert (entry["loss_scale"], entry["apex_amp_v1"]) == (8.0, {"dynamic": False})


def test_the_window_of_2019_is_lost_where_it_is_another():
    _, optimizer = old_run(optimizers.FP16_Optimizer, dynamic_loss_scale=True)
    assert convert(optimizer.state_dict(), to="amp").lost == (
        "growth_interval is 1000: pass it to amp.initialize.",
    )


@pytest.mark.parametrize("window", [2000, 2000.0])  # apex counted with any number
def test_apex_s_pickled_scalers_of_2018_are_read(window):
    _, optimizer = old_run(fp16_utils.FP16_Optimizer)
    state = optimizer.state_dict()

    class DynamicLossScaler:
        def __init__(self):
            self.cur_scale, self.cur_iter, self.last_overflow_iter = 256.0, 12, 4
            self.scale_factor, self.scale_window = 2.0, window

    state.update(loss_scaler=DynamicLossScaler(), dynamic_loss_scale=True)
    converted = convert(state, to="amp")
    assert converted == Converted({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 7}})
    assert type(converted.state["loss_scaler0"]["unskipped"]) is int


def test_flat_moments_of_apex_in_2019_are_cut_up_by_the_model_s_shapes():
    model, optimizer = old_run(optimizers.FP16_Optimizer)
    expected = optimizer.optimizer.state_dict()
    checkpoint = checkpoint_of(model, optimizer)
    checkpoint["optimizer"] = apex_2019.flattened(checkpoint["optimizer"])
    converted = convert(checkpoint, to="optimizer")
    assert cases.same(converted.state, expected)
    assert converted.lost == ()


def codes(value):
    """What bitsandbytes keeps of an average: codes, a scale per block, and the codes' values."""
    scales = torch.ones(-(-value.numel() // 256))
    return {"state1": value.to(torch.uint8), "absmax1": scales, "qmap1": torch.linspace(-1, 1, 256)}


@pytest.mark.parametrize("nested", [False, True])
def test_moments_in_8_bits_of_a_flat_group_are_refused(nested):
    model, optimizer = old_run(optimizers.FP16_Optimizer)
    checkpoint = checkpoint_of(model, optimizer)
    checkpoint["optimizer"] = apex_2019.flattened(checkpoint["optimizer"])
    inner = checkpoint["optimizer"]["optimizer_state_dict"]
    for index, state in inner["state"].items():
        low = codes(state["exp_avg"])
        inner["state"][index] = {"step": 3, **({"quantized": low} if nested else low)}
    with pytest.raises(ValueError, match=r"8 bits or fewer.*to='weights'.*new optimizer"):
        convert(checkpoint, to="optimizer")
    assert convert(checkpoint, to="weights").lost == ()


def test_moments_in_8_bits_of_single_parameters_stay_as_they_are():
    model, optimizer = old_run(optimizers.FP16_Optimizer)
    checkpoint = checkpoint_of(model, optimizer)
    inner = checkpoint["optimizer"]["optimizer_state_dict"]
    inner["state"] = {i: codes(state["exp_avg"]) for i, state in inner["state"].items()}
    assert cases.same(convert(checkpoint, to="optimizer").state, inner)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_scales_of_moments_in_8_bits_stay_fp32_at_every_level(level):
    model = cases.net()
    optimizer = cases.sgd(model.parameters())
    weight = model[0].weight
    optimizer.state[weight] = codes(torch.ones(32))
    before = copy.deepcopy(optimizer.state[weight])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert cases.same(optimizer.state[optimizer.param_groups[0]["params"][0]], before)
    amp.restore(model, optimizer)
    assert cases.same(optimizer.state[weight], before)


def test_masters_without_the_model_are_refused_for_they_have_no_names():
    _, optimizer = old_run(optimizers.FP16_Optimizer)
    with pytest.raises(ValueError, match=r"needs a model's state dict.*apex\.optimizers\.FP16"):
        convert(optimizer.state_dict(), to="weights")


# -- weights ---------------------------------------------------------------------------------


def test_16_bit_weights_without_masters_are_told_one_by_one():
    state = {"a": torch.tensor([0.1]).half(), "b": torch.tensor([0.1]), "n": torch.tensor(3)}
    converted = convert(state, to="weights")
    assert converted.lost == ("a is 16-bit and has no master.",)
    assert cases.same(converted.state, {**state, "a": state["a"].float()})


def test_masters_of_another_model_are_told():
    _, optimizer = old_run(fp16_utils.FP16_Optimizer)
    converted = convert(
        {"model": cases.net(seed=9).half().state_dict(), "optimizer": optimizer.state_dict()},
        to="weights",
    )
    assert converted.lost[-1] == "Masters that match no entry in the model's state dict: 4."
    assert len(converted.lost) == 5


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_checkpoint_of_amp_has_the_masters_in_its_model(level):
    model, optimizer = cases.prepared(level)
    cases.train_step(model, optimizer, *cases.batch())
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
    }
    converted = convert(checkpoint, to="weights")
    assert converted.lost == ()
    assert cases.same(list(converted.state.values()), cases.masters(optimizer))


def test_masters_that_a_fused_optimizer_keeps_are_found():
    model = half_net()
    optimizer = FusedAdam(model.parameters(), lr=1e-2, capturable=True, master_weights=True)
    cases.loss_of(model, cases.batch()[0].half(), cases.batch()[1]).backward()
    optimizer.step()
    converted = convert({"m": model.state_dict(), "o": optimizer.state_dict()}, to="weights")
    expected = [optimizer.state[param]["master_param"] for param in model.parameters()]
    assert cases.same(list(converted.state.values()), expected)
    assert converted.lost == ()


def test_tied_weights_share_one_master():
    master = torch.tensor([1 / 3, 0.1])
    state = {"embed": master.half(), "head": master.half()}
    optimizer = {"param_groups": [{"params": [0]}], "state": {0: {"master_param": master}}}
    converted = convert({"model": state, "optimizer": optimizer}, to="weights")
    assert cases.same(converted.state, {"embed": master, "head": master})
    assert converted.lost == ()


def test_groups_in_another_order_than_the_model_find_their_entries():
    model = half_net()
    decay, rest = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    optimizer = optimizers.FP16_Optimizer(
        torch.optim.SGD([{"params": rest}, {"params": decay}], lr=0.1), verbose=False
    )
    optimizer.backward(cases.loss_of(model, cases.batch()[0].half(), cases.batch()[1]))
    optimizer.step()
    converted = convert(checkpoint_of(model, optimizer), to="weights")
    (bias0, bias2), (weight0, weight2) = [g["params"] for g in optimizer.param_groups]
    assert cases.same(list(converted.state.values()), [weight0, bias0, weight2, bias2])
    assert converted.lost == ()


# -- MMEngine and whole checkpoints ----------------------------------------------------------


def mmengine(scale=ENTRY):
    model = cases.net()
    optimizer = {**adam(model.parameters()).state_dict(), "apex_amp": {"loss_scaler0": scale}}
    return model, {
        "meta": {"epoch": 1},
        "state_dict": model.state_dict(),
        "message_hub": {"runtime_info": {"iter": 3}},
        "optimizer": {**optimizer, "base_param_settings": {"lr": 0.1}},
    }


def test_an_mmengine_checkpoint_gives_all_three_parts():
    model, checkpoint = mmengine()
    assert convert(checkpoint, to="amp") == Converted({"loss_scaler0": ENTRY})
    assert cases.same(convert(checkpoint, to="weights").state, dict(model.state_dict()))
    converted = convert(checkpoint, to="optimizer")
    adam(model.parameters()).load_state_dict(converted.state)
    assert converted.lost == ("base_param_settings is not part of an optimizer's state.",)


def test_nothing_that_is_given_changes():
    for _, checkpoint in (mmengine(), (None, checkpoint_of(*old_run(optimizers.FP16_Optimizer)))):
        before = copy.deepcopy(checkpoint)
        for to in ("amp", "grad_scaler", "optimizer", "weights"):
            convert(checkpoint, to=to)
        assert cases.same(checkpoint, before)


# -- refusals --------------------------------------------------------------------------------


def test_an_unknown_checkpoint_is_refused_with_its_keys():
    with pytest.raises(ValueError, match=r"keys are 'epoch', 'best'\. It accepts states of amp"):
        convert({"epoch": 3, "best": {"loss": 0.1}}, to="amp")


def test_a_grad_scaler_s_state_cut_short_is_refused_with_its_keys():
    cut = {key: value for key, value in SCALER.items() if key != "_growth_tracker"}
    with pytest.raises(ValueError, match="whose keys are 'scale', 'growth_factor'"):
        convert(cut, to="amp")


def test_two_models_are_refused_with_their_places_where_one_is_asked_for():
    state = cases.net().state_dict()
    checkpoint = {"model": state, "ema": state, "scaler": SCALER}
    with pytest.raises(ValueError, match="'model' and 'ema'"):
        convert(checkpoint, to="weights")
    assert convert(checkpoint, to="amp") == Converted({"loss_scaler0": ENTRY})


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("amp", "needs a loss scale.*keys 'model', holds a model"),
        ("optimizer", "needs an optimizer's state.*keys 'model'"),
    ],
)
def test_a_part_that_is_not_there_is_named_with_the_keys(to, words):
    with pytest.raises(ValueError, match=words):
        convert({"model": cases.net().state_dict()}, to=to)


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("scale", float("nan"), RuntimeError, r"'scale'\] is nan"),
        ("scale", -1.0, RuntimeError, r"'scale'\] is -1"),
        ("scale", "8", RuntimeError, r"'scale'\] is '8'; it must be a number"),
        ("scale", True, RuntimeError, r"'scale'\] is True"),
        ("_growth_tracker", 0.5, RuntimeError, r"'_growth_tracker'\] is 0\.5; it must be a count"),
        ("growth_interval", 0, ValueError, "growth_interval is 0"),
        ("growth_factor", "2", TypeError, "growth_factor is '2'"),
    ],
)
def test_a_grad_scaler_s_value_that_makes_no_sense_is_refused_by_name(name, value, error, words):
    with pytest.raises(error, match=words):
        convert({"grad_scaler": {**SCALER, name: value}}, to="amp")


@each_wrapper
@pytest.mark.parametrize("value", [float("inf"), None, -2.0])
def test_an_old_optimizer_s_scale_that_makes_no_sense_is_refused_by_name(wrapper, value):
    _, optimizer = old_run(wrapper, steps=1)
    state = optimizer.state_dict()
    if "cur_scale" in state:
        state["cur_scale"] = value
    else:
        state["loss_scaler"] = {"cur_scale": value}
    with pytest.raises(RuntimeError, match=r"'cur_scale'\] is"):
        convert({"optimizer": state}, to="amp")


def test_the_form_and_the_checkpoint_are_checked():
    with pytest.raises(ValueError, match=r"to='apex'; it accepts 'amp', 'grad_scaler'"):
        convert(SCALER, to="apex")
    with pytest.raises(TypeError, match="got list; it accepts the dict"):
        convert([SCALER], to="amp")


def test_extra_state_of_a_module_stays_as_it_is():
    model = {"layer.weight": torch.ones(2).half(), "layer._extra_state": {"calls": 3}}
    weights = amp.checkpoint.convert({"model": model}, to="weights").state
    assert weights["layer._extra_state"] == {"calls": 3}
    assert weights["layer.weight"].dtype is torch.float32
