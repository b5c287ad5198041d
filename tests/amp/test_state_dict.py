import copy
import io
import re
from collections import OrderedDict

import pytest
import torch

import apex.amp as amp
from tests.amp.cases import (
    DYNAMIC,
    LEVELS,
    Net,
    backward,
    overflow,
    prepared,
    scale,
    sgd,
    train,
    unskipped,
)


def entry(loss_scale, unskipped):
    return {"loss_scale": loss_scale, "unskipped": unskipped}


def static(loss_scale, unskipped):
    return {**entry(loss_scale, unskipped), "apex_amp_v1": {"dynamic": False}}


# -- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_an_ordered_dict_of_plain_numbers(level):
    model, optimizer = prepared(level)
    train(model, optimizer, steps=2)
    state = amp.state_dict()
    assert type(state) is OrderedDict
    found = {name: value for name, value in state["loss_scaler0"].items() if name != "apex_amp_v1"}
    assert [*state] == ["loss_scaler0"]
    assert found == entry(2.0**16 if level in DYNAMIC else 1.0, 2)
    assert [type(value) for value in found.values()] == [float, int]


@pytest.mark.parametrize("level", LEVELS)
def test_a_dynamic_entry_has_apex_s_names_alone_and_a_static_one_says_so(level):
    keep = prepared(level)
    added = {} if level in DYNAMIC else {"apex_amp_v1": {"dynamic": False}}
    assert amp.state_dict() == {
        "loss_scaler0": {**entry(2.0**16 if level in DYNAMIC else 1.0, 0), **added}
    }
    del keep


def test_it_has_an_entry_for_each_loss_in_order():
    model, optimizer = prepared("O2", num_losses=12)
    overflow(model, optimizer, loss_id=10)
    state = amp.state_dict()
    assert list(state) == [f"loss_scaler{index}" for index in range(12)]
    assert [value["loss_scale"] for value in state.values()].index(2.0**15) == 10


def test_it_has_the_scalers_of_all_living_sessions_in_order():
    first, second = prepared("O2", loss_scale=2.0), prepared("O2", loss_scale=4.0, num_losses=2)
    assert [value["loss_scale"] for value in amp.state_dict().values()] == [2.0, 4.0, 4.0]
    del first
    assert [value["loss_scale"] for value in amp.state_dict().values()] == [4.0, 4.0]
    del second
    assert amp.state_dict() == {}


def test_it_is_empty_before_initialize():
    assert amp.state_dict() == OrderedDict()


def test_it_does_not_follow_later_steps():
    model, optimizer = prepared("O2")
    state = amp.state_dict()
    overflow(model, optimizer)
    assert state == {"loss_scaler0": entry(2.0**16, 0)}


def test_it_survives_torch_save():
    keep = prepared("O2")
    file = io.BytesIO()
    torch.save(amp.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == amp.state_dict()
    del keep


# -- loading ---------------------------------------------------------------------------------


def test_loading_sets_scale_and_count():
    keep = prepared("O2", num_losses=2)
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7), "loss_scaler1": entry(2.0**20, 1999)})
    assert [(scale(i), unskipped(i)) for i in range(2)] == [(512.0, 7), (2.0**20, 1999)]
    del keep


def test_loading_goes_by_number_not_by_order():
    keep = prepared("O2", num_losses=11)
    state = amp.state_dict()
    state["loss_scaler10"]["loss_scale"] = 2.0
    amp.load_state_dict(dict(sorted(state.items(), reverse=True)))
    assert (scale(10), scale(1)) == (2.0, 2.0**16)
    del keep


def test_loading_sets_a_static_scale_too():
    model, optimizer = prepared("O2", loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": static(64.0, 3)})
    loss = model.last.weight.float().sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == 64.0 * loss
        scaled_loss.backward()
    assert next(p for p in amp.master_params(optimizer) if p.shape == (2, 6)).grad.eq(1.0).all()


@pytest.mark.parametrize("loss_scale", [0.1, 1 / 3, 2.0**-20, 1e30])
def test_a_static_scale_is_saved_and_loaded_to_the_last_bit(loss_scale):
    keep = prepared("O0", loss_scale=loss_scale)
    assert scale() == loss_scale
    state = amp.state_dict()
    del keep
    keep = prepared("O0", loss_scale=2.0)
    amp.load_state_dict(state)
    assert scale() == loss_scale
    del keep


def test_a_count_beyond_the_growth_interval_grows_the_scale_at_the_next_clean_step():
    model, optimizer = prepared("O5", loss_scale="dynamic", growth_interval=5)
    amp.load_state_dict({"loss_scaler0": entry(8.0, 1000)})
    train(model, optimizer, steps=1)
    assert (scale(), unskipped()) == (16.0, 0)


@pytest.mark.parametrize("present", ["O2", "O5"])
def test_names_of_later_versions_are_ignored_in_an_entry(present):
    keep = prepared(present, loss_scale="dynamic")
    state = {"loss_scaler0": {**entry(8.0, 1), "apex_amp_v2": [1], "apex_amp_v1": {"new": 1}}}
    amp.load_state_dict(state)
    assert (scale(), unskipped()) == (8.0, 1)
    del keep


# -- what has no meaning here ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "saved", "words"),
    [
        ("dynamic", static(1.0, 9), r"scale is static \(1\).*dynamic, at 65536"),
        (1.0, entry(512.0, 9), r"scaler is static \(1\).*the checkpoint's 512"),
        (1.0, {**entry(1.0, 9), "apex_amp_v1": {"dynamic": True}}, r"scaler is static \(1\)"),
    ],
)
def test_a_dynamic_scale_says_nothing_to_a_static_one_nor_the_other_way(
    present, saved, words, caplog
):
    keep = prepared("O5", loss_scale=present)
    before = amp.state_dict()
    amp.load_state_dict({"loss_scaler0": saved})
    assert amp.state_dict() == before
    assert re.search(f"amp skipped loss_scaler0.*{words}", caplog.text)
    assert {record.name for record in caplog.records} == {"apex"}
    del keep


@pytest.mark.parametrize(
    ("saved", "present", "words"),
    [("O5", ("O2", 128.0), "static (128)"), ("O2", ("O5", 1.0), "static (1)")],
)
def test_a_scale_of_1_that_scales_nothing_is_not_exchanged_for_another(
    saved, present, words, caplog
):
    keep = prepared(saved, loss_scale=None if saved == "O5" else 128.0)
    state = amp.state_dict()
    del keep
    level, loss_scale = present
    keep = prepared(level, loss_scale=loss_scale)
    amp.load_state_dict(state)
    assert scale() == loss_scale
    assert f"amp skipped loss_scaler0: this scaler is {words}" in caplog.text
    del keep


@pytest.mark.parametrize(("present", "count"), [("dynamic", 3), (64.0, 3)])
def test_apex_s_file_fits_a_dynamic_scale_and_a_static_one_of_the_same_value(
    present, count, caplog
):
    keep = prepared("O2", loss_scale=present)
    amp.load_state_dict({"loss_scaler0": entry(64.0, count)})
    assert (scale(), unskipped()) == (64.0, count)
    assert not caplog.records
    del keep


# -- loading before initialize ---------------------------------------------------------------


def test_a_state_loaded_before_initialize_is_taken_by_it():
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7), "loss_scaler1": entry(256.0, 0)})
    assert amp.state_dict() == {}
    keep = prepared("O2", num_losses=2)
    assert [(scale(i), unskipped(i)) for i in range(2)] == [(512.0, 7), (256.0, 0)]
    del keep


def test_it_is_taken_by_the_old_handle_too():
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7)})
    keep = amp.init()
    assert (scale(), unskipped()) == (512.0, 7)
    del keep


def test_it_is_taken_once():
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7)})
    keep = prepared("O2"), prepared("O2")
    assert [(scale(i), unskipped(i)) for i in range(2)] == [(512.0, 7), (2.0**16, 0)]
    del keep


def test_several_sessions_take_it_in_order(caplog):
    amp.load_state_dict({f"loss_scaler{i}": entry(2.0**i, i) for i in range(1, -1, -1)})
    first = prepared("O2")
    assert "the next amp.initialize call will load loss_scaler1 of the checkpoint" in caplog.text
    second = prepared("O2")
    assert [(scale(i), unskipped(i)) for i in range(2)] == [(1.0, 0), (2.0, 1)]
    del first, second


def test_a_loss_without_a_waiting_scale_starts_anew_and_is_named(caplog):
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7)})
    keep = prepared("O2", num_losses=3)
    assert [scale(i) for i in range(3)] == [512.0, 2.0**16, 2.0**16]
    assert "no scale for loss 1, 2; it starts at the default" in caplog.text
    del keep


def test_a_second_load_replaces_what_waits():
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7), "loss_scaler1": entry(4.0, 0)})
    amp.load_state_dict({"loss_scaler0": entry(8.0, 1)})
    keep = prepared("O2"), prepared("O2")
    assert [scale(i) for i in range(2)] == [8.0, 2.0**16]
    del keep


def test_a_load_into_living_sessions_drops_what_waits():
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7), "loss_scaler1": entry(4.0, 0)})
    first = prepared("O2")
    amp.load_state_dict({"loss_scaler0": entry(8.0, 1)})
    second = prepared("O2")
    assert [scale(i) for i in range(2)] == [8.0, 2.0**16]
    del first, second


def test_a_bad_state_is_refused_at_once_and_leaves_what_waits():
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7)})
    with pytest.raises(RuntimeError, match="must be positive and finite"):
        amp.load_state_dict({"loss_scaler0": entry(0.0, 7)})
    keep = prepared("O2")
    assert scale() == 512.0
    del keep


def test_a_failed_initialize_takes_nothing():
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7)})
    with pytest.raises(RuntimeError, match="on the meta device"):
        amp.initialize(Net().to("meta"), opt_level="O2", verbosity=0)
    keep = prepared("O2")
    assert scale() == 512.0
    del keep


def test_a_disabled_initialize_takes_nothing_and_says_nothing(caplog, capsys):
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7)})
    model = Net()
    amp.initialize(model, sgd(model), enabled=False)
    amp.load_state_dict({"loss_scaler0": entry(2.0, 7)})
    assert not caplog.records
    assert capsys.readouterr() == ("", "")
    keep = prepared("O2")
    assert scale() == 512.0
    del keep


def test_a_state_loaded_when_all_sessions_have_ended_waits_too():
    keep = prepared("O2")
    del keep
    amp.load_state_dict({"loss_scaler0": entry(512.0, 7)})
    keep = prepared("O2")
    assert scale() == 512.0
    del keep


@pytest.mark.parametrize("level", LEVELS)
def test_saved_loaded_and_continued_training_equals_uninterrupted(level):
    model, optimizer = prepared(level, growth_interval=3, optimizer=momentum)
    train(model, optimizer, steps=2)
    if level in DYNAMIC:
        overflow(model, optimizer)
        optimizer.step()
    train(model, optimizer, steps=2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    expected = train(model, optimizer, steps=5), amp.state_dict()
    del model, optimizer

    model, optimizer = prepared(level, growth_interval=3, optimizer=momentum)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert all(map(torch.equal, masters, amp.master_params(optimizer)))
    assert (train(model, optimizer, steps=5), amp.state_dict()) == expected


@pytest.mark.parametrize("level", LEVELS)
def test_a_cell_that_is_run_again_resumes_while_its_first_run_lives(level):
    whole = prepared(level, growth_interval=3, optimizer=momentum)
    train(*whole, steps=4)
    saved = copy.deepcopy((whole[0].state_dict(), whole[1].state_dict(), amp.state_dict()))
    expected = train(*whole, steps=5), list(amp.state_dict().values())

    again = prepared(level, growth_interval=3, optimizer=momentum)
    for part, state in zip((*again, amp), saved, strict=True):
        part.load_state_dict(state)
    kept, of_again = amp.state_dict().values()
    assert (kept, of_again) == (*expected[1], *saved[2].values())
    resumed = train(*again, steps=5), list(amp.state_dict().values())[1:]
    assert resumed == expected


def momentum(model):
    return sgd(model, momentum=0.5)


@pytest.mark.parametrize(("saved", "present"), [(3, 1), (1, 3)])
def test_another_number_of_scalers_warns_and_loads_what_fits(saved, present):
    keep = prepared("O2", num_losses=present)
    state = {f"loss_scaler{i}": entry(2.0**i, i) for i in range(saved)}
    words = f"got {saved} loss scalers, but amp has {present}.*same num_losses"
    with pytest.warns(UserWarning, match=words):
        amp.load_state_dict(state)
    fits = min(saved, present)
    found = [(scale(i), unskipped(i)) for i in range(present)]
    assert found == [(2.0**i, i) for i in range(fits)] + [(2.0**16, 0)] * (present - fits)
    del keep


@pytest.mark.parametrize("losses", [1, 2])
def test_with_two_sessions_as_many_entries_as_the_newest_has_go_to_it(caplog, losses):
    first, second = prepared("O2"), prepared("O1", num_losses=losses)
    amp.load_state_dict({f"loss_scaler{i}": entry(2.0**i, i) for i in range(losses)})
    found = [(scale(i), unskipped(i)) for i in range(1 + losses)]
    assert found == [(2.0**16, 0), *((2.0**i, i) for i in range(losses))]
    (record,) = caplog.records
    assert f"{losses} loss scalers, which the newest amp.initialize" in record.getMessage()
    del first, second


def test_with_two_sessions_as_many_entries_as_both_have_go_to_both(caplog):
    first, second = prepared("O2"), prepared("O1")
    amp.load_state_dict({f"loss_scaler{i}": entry(2.0**i, i) for i in range(2)})
    assert [(scale(i), unskipped(i)) for i in range(2)] == [(1.0, 0), (2.0, 1)]
    assert not caplog.records
    del first, second


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"model": {}}, "unexpected key 'model'"),
        ({"loss_scaler": entry(1.0, 0)}, "unexpected key 'loss_scaler'"),
        ({"loss_scaler1x": entry(1.0, 0)}, "unexpected key 'loss_scaler1x'"),
        ({3: entry(1.0, 0)}, "unexpected key 3"),
        ({"loss_scaler1": 3.0}, r"'loss_scaler1' holds 3\.0; it must be a dict"),
        ({"loss_scaler1": {"unskipped": 0}}, r"loss_scaler1\['loss_scale'\] is None"),
        ({"loss_scaler1": {"loss_scale": 1.0}}, r"loss_scaler1\['unskipped'\] is None"),
        ({"loss_scaler1": entry("8", 0)}, r"loss_scaler1\['loss_scale'\] is '8'; it must be a num"),
        ({"loss_scaler1": entry(0.0, 0)}, "must be positive and finite"),
        ({"loss_scaler1": entry(float("nan"), 0)}, "must be positive and finite"),
        ({"loss_scaler1": entry(1.0, -1)}, "must be a count"),
        ({"loss_scaler1": entry(1.0, 0.5)}, "must be a count"),
        ({"loss_scaler1": entry(1.0, float("nan"))}, "must be a count"),
        ({"loss_scaler1": entry(1.0, float("inf"))}, "must be a count"),
        ({"loss_scaler1": entry(1.0, 2**31)}, "must be a count"),
        ({"loss_scaler1": entry(-8.0, 0)}, "must be positive and finite"),
        ({"loss_scaler1": entry(float("inf"), 0)}, "must be positive and finite"),
        ({"loss_scaler1": entry(1e39, 0)}, "must be positive and finite in fp32"),
        ({"loss_scaler1": entry(10**400, 0)}, "must be positive and finite in fp32"),
        ({"loss_scaler1": entry(1e-46, 0)}, "must be positive and finite in fp32"),
        ({"loss_scaler1": entry(True, 0)}, r"loss_scaler1\['loss_scale'\] is True"),
        ({"loss_scaler1": entry(1.0, False)}, r"loss_scaler1\['unskipped'\] is False"),
        ({"loss_scaler1": entry(torch.ones(1), 0)}, r"loss_scaler1\['loss_scale'\] is tensor"),
        ({"loss_scaler1": {**static(1.0, 0), "apex_amp_v1": {"dynamic": 1}}}, "'apex_amp_v1'"),
        ({"loss_scaler1": {**static(1.0, 0), "apex_amp_v1": 3}}, "'apex_amp_v1'"),
        ({"loss_scaler2": entry(1.0, 0)}, "'loss_scaler1' is missing; the keys are loss_scaler0"),
        ({"loss_scaler01": entry(1.0, 0)}, "unexpected key 'loss_scaler01'"),
    ],
)
def test_a_bad_key_or_value_is_refused_by_name_and_changes_nothing(bad, words):
    keep = prepared("O2", num_losses=2)
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match=words):
        amp.load_state_dict({"loss_scaler0": entry(8.0, 1), **bad})
    assert amp.state_dict() == before
    del keep


@pytest.mark.parametrize("bad", [None, [1.0], "loss_scaler0", 3])
def test_what_is_no_dict_is_refused(bad):
    keep = prepared("O2")
    with pytest.raises(RuntimeError, match=r"accepts the dict that amp\.state_dict"):
        amp.load_state_dict(bad)
    del keep


# -- the model's -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_model_s_state_dict_is_fp32(level):
    model, optimizer = prepared(level)
    train(model, optimizer)
    dtypes = {value.dtype for value in model.state_dict().values() if value.is_floating_point()}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_a_plain_model_loads_it(level):
    model, optimizer = prepared(level)
    train(model, optimizer)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    low = {name: p.to(model.get_parameter(name).dtype) for name, p in plain.named_parameters()}
    assert all(torch.equal(low[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_it_holds_the_masters_values(level):
    model, optimizer = prepared(level)
    backward(model.last.weight.float().pow(2).sum(), optimizer)
    optimizer.step()
    master = next(p for p in amp.master_params(optimizer) if p.shape == (2, 6))
    assert torch.equal(model.state_dict()["last.weight"], master)
