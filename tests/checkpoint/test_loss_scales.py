"""``amp.state_dict`` and ``amp.load_state_dict``: apex's format."""

from collections import OrderedDict

import pytest

from apex import amp
from tests.support import loops


def entry(loss_scale, unskipped):
    return {"loss_scale": loss_scale, "unskipped": unskipped}


def static(loss_scale, unskipped):
    return {**entry(loss_scale, unskipped), "apex_amp_v1": {"dynamic": False}}


def states(*values):
    return {f"loss_scaler{index}": entry(*value) for index, value in enumerate(values)}


def found(count):
    return [(loops.scale(index), loops.unskipped(index)) for index in range(count)]


# -- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", loops.LEVELS)
def test_an_entry_has_apexs_two_numbers_and_says_whether_the_scale_is_static(level):
    model, optimizer = loops.prepared(level)
    loops.train(model, optimizer, data=loops.small_batches(2))
    state = amp.state_dict()
    assert type(state) is OrderedDict
    expected = entry(2.0**16, 2) if level in loops.DYNAMIC else static(1.0, 2)
    assert state == {"loss_scaler0": expected}
    assert [*map(type, state["loss_scaler0"].values())][:2] == [float, int]
    loaded = loops.saved_and_loaded(state, weights_only=True)
    loops.overflow(model, optimizer)
    assert loaded == state


def test_it_has_the_scalers_of_the_newest_initialize():
    """As in the original, whether or not an earlier model lives on."""
    assert amp.state_dict() == OrderedDict()
    first = loops.prepared("O2", num_losses=11)
    loops.overflow(*first, loss_id=10)
    assert [*amp.state_dict()] == [f"loss_scaler{index}" for index in range(11)]
    assert [loops.scale(10), loops.scale(0)] == [2.0**15, 2.0**16]
    second = loops.prepared("O2", loss_scale=4.0, num_losses=2)
    assert [value["loss_scale"] for value in amp.state_dict().values()] == [4.0, 4.0]
    amp.restore(*second)
    assert loops.scale(10) == 2.0**15
    del first, second
    assert amp.state_dict({"own": 1}) == {"own": 1}


# -- loading ---------------------------------------------------------------------------------


def test_loading_goes_by_number():
    _keep = loops.prepared("O2", num_losses=11)
    values = [(2.0**index, index) for index in range(11)]
    amp.load_state_dict(dict(sorted(states(*values).items(), reverse=True)))
    assert found(11) == values


def test_a_count_beyond_the_growth_interval_grows_the_scale_at_the_next_clean_step():
    model, optimizer = loops.prepared("O5", loss_scale="dynamic", growth_interval=5)
    others = {"other": [1], "apex_amp_v1": {"new": 1}}  # unknown keys are ignored
    amp.load_state_dict({"loss_scaler0": {**entry(8.0, 1000.0), **others}})
    loops.train(model, optimizer, data=loops.small_batches(1))
    assert found(1) == [(16.0, 0)]


OTHER_SCALES = [
    ("dynamic", static(512.0, 9), 2.0**16, "dynamic (65536)"),
    (128.0, entry(512.0, 9), 128.0, "static (128)"),
    ("dynamic", static(1.0, 9), 2.0**16, None),  # O5's into O2
    (1.0, entry(2.0**16, 9), 1.0, None),  # O2's into O5
    (1.0, static(128.0, 9), 1.0, None),
    (128.0, static(1.0, 9), 128.0, None),
    (64.0, entry(64.0, 9), 64.0, None),
    (2.0, static(1 / 3, 9), 1 / 3, None),
    ("dynamic", entry(64.0, 9), 64.0, None),
]


@pytest.mark.parametrize(("present", "saved", "after", "words"), OTHER_SCALES)
def test_a_scale_of_another_kind_is_not_loaded(present, saved, after, words, caplog):
    _keep = loops.prepared("O5", loss_scale=present)
    amp.load_state_dict({"loss_scaler0": saved})
    assert loops.scale() == after
    if words is None:
        assert not caplog.records
    else:
        ignored = "ignored loss_scaler0 of the checkpoint (loss scale 512), because this loss scale"
        assert f"{ignored} is {words}." in caplog.text


@pytest.mark.parametrize(("saved", "present"), [(3, 1), (1, 3)])
def test_another_number_of_scalers_warns_and_loads_what_fits(saved, present):
    _keep = loops.prepared("O2", num_losses=present)
    words = f"got {saved} loss scalers, but amp has {present}.*same num_losses"
    with pytest.warns(UserWarning, match=words):
        amp.load_state_dict(states(*((2.0**index, index) for index in range(saved))))
    fits = min(saved, present)
    given = [(2.0**index, index) for index in range(fits)]
    assert found(present) == given + [(2.0**16, 0)] * (present - fits)


def test_with_two_sessions_the_newest_is_loaded_into():
    _first, second = loops.prepared("O2"), loops.prepared("O1", num_losses=2)
    amp.load_state_dict(states((1.0, 0), (2.0, 1)))
    assert found(2) == [(1.0, 0), (2.0, 1)]
    amp.restore(*second)
    assert found(1) == [(2.0**16, 0)]


BAD_STATES = [
    ({"model": {}}, "unexpected key 'model'"),
    ({"loss_scaler01": entry(1.0, 0)}, "unexpected key 'loss_scaler01'"),
    ({3: entry(1.0, 0)}, "unexpected key 3"),
    ({"loss_scaler1": 3.0}, r"loss_scaler1\['loss_scale'\] is None; it must be a number"),
    ({"loss_scaler1": {"loss_scale": 1.0}}, r"loss_scaler1\['unskipped'\] is None"),
    ({"loss_scaler1": entry(0.0, 0)}, r"is 0\.0; it must be a number from 1\.17549e-38"),
    ({"loss_scaler1": entry(float("nan"), 0)}, "is nan; it must"),
    ({"loss_scaler1": entry(10**400, 0)}, "it must be a number from"),
    ({"loss_scaler1": entry(1.0, -1)}, r"\['unskipped'\] is -1"),
    ({"loss_scaler1": entry(8.0, 1.5)}, r"'unskipped'\] is 1.5; it must be a whole number"),
    (
        {"loss_scaler1": {**entry(8.0, 1), "apex_amp_v2": {}}},
        "loss_scaler1 has 'apex_amp_v2', which a later release.*Load the checkpoint with that",
    ),
    ({"loss_scaler1": entry(True, 0)}, r"loss_scaler1\['loss_scale'\] is True"),
    ({"loss_scaler2": entry(1.0, 0)}, "'loss_scaler1' is missing; the keys are loss_scaler0"),
    (None, r"accepts the dict that amp\.state_dict"),
]


@pytest.mark.parametrize(("bad", "words"), BAD_STATES)
def test_a_bad_state_is_refused_by_name_and_changes_nothing(bad, words):
    _keep = loops.prepared("O2", num_losses=2)
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match=words):
        amp.load_state_dict(bad if bad is None else {"loss_scaler0": entry(8.0, 1), **bad})
    assert amp.state_dict() == before


# -- loading without a scale -----------------------------------------------------------------


def test_a_state_is_refused_before_initialize_and_ignored_when_amp_is_disabled(capsys):
    with pytest.raises(RuntimeError, match=r"no loss scale to load into. Call amp.initialize fir"):
        amp.load_state_dict(states((512.0, 7)))
    model = loops.Net()
    amp.initialize(model, loops.sgd(model.parameters()), enabled=False)
    amp.load_state_dict(states((2.0, 7)))
    assert capsys.readouterr() == ("", "")
    _keep = loops.prepared("O2")
    assert loops.scale() == 2.0**16
