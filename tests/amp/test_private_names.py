"""The names behind the public ones that scripts use; one test for each of docs/compatibility.md."""

import copy
import functools
import importlib
import pickle

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex.amp import _initialize
from apex.amp.scaler import LossScaler
from apex.parallel import LARC
from tests.amp.cases import (
    LEVELS,
    Net,
    overflow,
    prepared,
    scale,
    sgd,
)

every_level = pytest.mark.parametrize("level", LEVELS)


# -- where it is -----------------------------------------------------------------------------


def test_amp_state_is_the_same_instance_by_every_path():
    from apex import amp as second
    from apex.amp._amp_state import _amp_state as first

    assert first is second._amp_state is amp._amp_state
    assert not isinstance(first, type(amp))


def test_importing_its_module_leaves_the_name_an_instance():
    import apex.amp._amp_state

    importlib.import_module("apex.amp._amp_state")
    assert apex.amp._amp_state.loss_scalers == []


@pytest.mark.parametrize(
    "name", ["state_dict", "load_state_dict", "initialize", "_amp_state", "lists"]
)
def test_names_are_real_attributes_of_the_module(name):
    assert name in amp.__dict__
    assert "__getattr__" not in amp.__dict__


def test_amp_itself_is_a_checkpoint_object():
    keep = prepared("O2")
    checkpoint = {name: each.state_dict() for name, each in {"amp": amp}.items()}
    checkpoint["amp"]["loss_scaler0"]["loss_scale"] = 2.0
    amp.load_state_dict(checkpoint["amp"])
    assert scale() == 2.0
    del keep


# -- _amp_state ------------------------------------------------------------------------------


@every_level
def test_opt_properties_reads_as_attributes_and_as_options(level):
    keep = prepared(level)
    properties = amp._amp_state.opt_properties
    assert properties.opt_level == properties.options["opt_level"] == level
    assert set(properties.options) >= {
        *("enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
        *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
    }
    del keep


def test_opt_properties_are_absent_before_initialize():
    assert not hasattr(amp._amp_state, "opt_properties")


def test_an_option_that_is_not_there_is_an_attribute_error_that_names_the_options():
    keep = prepared("O5")
    with pytest.raises(AttributeError, match=r"no option 'opt_lvl'; the options are enabled,"):
        _ = amp._amp_state.opt_properties.opt_lvl
    del keep


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_opt_properties_can_be_copied(duplicate):
    keep = prepared("O5")
    assert duplicate(amp._amp_state.opt_properties).opt_level == "O5"
    del keep


def test_loss_scalers_are_those_of_the_newest_session():
    first, second = prepared("O2", num_losses=2), prepared("O2", loss_scale=4.0)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4.0]
    del second
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [2.0**16] * 2
    del first


def test_loss_scalers_are_empty_before_initialize():
    assert amp._amp_state.loss_scalers == []


def test_a_loss_scaler_can_be_replaced_and_the_next_pass_uses_it():
    model, optimizer = prepared("O2")
    amp._amp_state.loss_scalers[0] = LossScaler(4.0)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss == 4.0
        (model.last.weight.float().sum() * scaled_loss).backward()
    assert model.last.weight.grad is not None
    assert scale() == 4.0


def test_the_list_of_loss_scalers_can_be_set_and_added_to():
    model, optimizer = prepared("O2")
    amp._amp_state.loss_scalers = [LossScaler(2.0), LossScaler("dynamic")]
    amp._amp_state.loss_scalers.append(LossScaler("dynamic"))
    assert [scale(index) for index in range(3)] == [2.0, 2.0**16, 2.0**16]
    overflow(model, optimizer, loss_id=2)
    assert [scale(index) for index in range(3)] == [2.0, 2.0**16, 2.0**15]
    del amp._amp_state.loss_scalers[0]
    assert len(amp.state_dict()) == 2


def test_loss_scalers_can_be_set_before_initialize_which_makes_its_own():
    made = LossScaler(2.0)
    amp._amp_state.loss_scalers = [made]
    assert amp._amp_state.loss_scalers == [made]
    keep = prepared("O2")
    assert scale() == 2.0**16
    del keep


def test_what_is_no_scaler_is_refused_among_them():
    keep = prepared("O2")
    with pytest.raises(TypeError, match=r"got float; it accepts apex\.amp\.scaler\.LossScaler"):
        amp._amp_state.loss_scalers[0] = 8.0
    assert scale() == 2.0**16
    del keep


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_of_the_loss_scalers_is_a_list_of_their_values(duplicate):
    model, optimizer = prepared("O2", num_losses=2)
    saved = duplicate(amp._amp_state.loss_scalers)
    overflow(model, optimizer)
    assert type(saved) is list
    assert [scaler.loss_scale() for scaler in saved] == [2.0**16] * 2
    assert scale() == 2.0**15


def test_bounds_of_the_scale_are_those_of_the_last_initialize_and_can_be_set():
    state = amp._amp_state
    assert (state.min_loss_scale, state.max_loss_scale) == (None, 2.0**24)
    keep = prepared("O2", min_loss_scale=2.0, max_loss_scale=2.0**20)
    assert (state.min_loss_scale, state.max_loss_scale) == (2.0, 2.0**20)
    state.min_loss_scale = state.max_loss_scale = 8.0
    assert (state.min_loss_scale, state.max_loss_scale) == (8.0, 8.0)
    del keep


@pytest.mark.parametrize("value", [None, amp.handle.NoOpHandle()])
def test_the_handle_can_be_set_until_the_next_initialize(value):
    first = prepared("O4")
    amp._amp_state.handle = value
    assert amp._amp_state.handle is value
    second = prepared("O4")
    assert amp._amp_state.handle.is_active()
    del first, second


@pytest.mark.parametrize(
    ("name", "value"),
    [("verbosity", 1), ("hard_override", False), ("allow_incoming_model_not_fp32", False)],
)
def test_switches_have_their_defaults_and_can_be_set(name, value):
    assert getattr(amp._amp_state, name) == value
    setattr(amp._amp_state, name, not value)
    assert getattr(amp._amp_state, name) == (not value)


def test_verbosity_is_that_of_the_last_initialize():
    keep = prepared("O5", verbosity=0)
    assert amp._amp_state.verbosity == 0
    del keep


# -- the handle ------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_the_handle_is_active_where_functions_cast(level):
    keep = prepared(level)
    handle = amp._amp_state.handle
    assert handle.is_active() is True
    assert handle._is_active is True
    del keep


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_the_handle_is_not_active_where_nothing_is_patched(level):
    keep = prepared(level)
    handle = amp._amp_state.handle
    assert (handle.is_active(), handle._is_active) == (False, False)
    handle._clear_cache()
    handle._deactivate()
    del keep


def test_deactivate_ends_the_casts_of_functions():
    keep = prepared("O4")
    handle = amp._amp_state.handle
    handle._deactivate()
    handle._deactivate()
    x = torch.ones(2, 2)
    assert (x @ x).dtype is torch.float32
    assert (handle.is_active(), handle._is_active) == (False, False)
    del keep


def test_deactivate_ends_the_casts_inside_the_model_too():
    model, _ = prepared("O4")
    amp._amp_state.handle._deactivate()
    assert model(torch.ones(2, 4)).dtype is torch.float32


def test_clear_cache_can_be_called_at_any_time():
    model, _ = prepared("O4")
    expected = model(torch.ones(2, 4))
    amp._amp_state.handle._clear_cache()
    assert torch.equal(model(torch.ones(2, 4)), expected)


# -- master_params ---------------------------------------------------------------------------


def test_master_params_of_an_optimizer_that_was_never_initialized_are_its_parameters():
    model = Net()
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    masters = list(amp.master_params(optimizer))
    assert all(a is b for a, b in zip(masters, model.parameters(), strict=True))


def test_master_params_go_through_larc():
    model = Net()
    larc = LARC(sgd(model))
    assert [id(p) for p in amp.master_params(larc)] == [id(p) for p in model.parameters()]


# -- _initialize.applier ---------------------------------------------------------------------


def test_applier_applies_a_function_to_the_tensors_in_a_nesting():
    value = {"a": [torch.ones(2), "text"], "b": (torch.zeros(1), None)}
    found = _initialize.applier(value, lambda t: t.double())
    assert found["a"][0].dtype is found["b"][0].dtype is torch.float64
    assert (found["a"][1], found["b"][1]) == ("text", None)


class Batch:
    """A batch type of a script's own, that the walk over containers does not know."""

    def __init__(self, x):
        self.x = x


class BatchNet(nn.Linear):
    def forward(self, batch):
        return Batch(super().forward(batch.x))


def applier(value, fn):
    if isinstance(value, Batch):
        return Batch(fn(value.x))
    return (
        kept_applier(value, fn)
        if not isinstance(value, tuple)
        else tuple(applier(v, fn) for v in value)
    )


kept_applier = _initialize.applier


def test_a_replaced_applier_casts_inputs_and_outputs(monkeypatch):
    monkeypatch.setattr(_initialize, "applier", applier)
    model = amp.initialize(BatchNet(2, 2), opt_level="O5", verbosity=0)
    out = model(Batch(torch.ones(3, 2)))
    assert out.x.dtype is torch.float32


class Samples(dict):
    """A batch type whose ``to`` moves it to a device and knows no dtypes."""

    def to(self, device):
        raise TypeError(f"{device} is no device")


class SamplesNet(nn.Linear):
    def forward(self, samples):
        return super().forward(samples["x"])


def samples_to_type(dtype, t):
    if isinstance(t, dict):
        return {key: value.to(dtype) for key, value in t.items()}
    return kept_to_type(dtype, t)


kept_to_type = _initialize.to_type


def test_a_replaced_to_type_casts_batches_with_a_to_of_their_own(monkeypatch):
    monkeypatch.setattr(_initialize, "to_type", samples_to_type)
    model = amp.initialize(SamplesNet(2, 2), opt_level="O5", verbosity=0)
    model = pickle.loads(pickle.dumps(model))
    assert model(Samples(x=torch.ones(3, 2))).dtype is torch.float32


class Moved:
    """A batch type with a ``to`` of its own, which works in place."""

    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        self.x = self.x.to(dtype)


def every_object_with_to(value, fn):
    if isinstance(value, (tuple, dict)):
        return kept_applier(value, fn)
    return fn(value)


@pytest.mark.parametrize("replacement", [None, every_object_with_to])
def test_an_applier_passes_objects_with_a_to_of_their_own_to_the_function(monkeypatch, replacement):
    if replacement is not None:
        monkeypatch.setattr(_initialize, "applier", replacement)
    batch = Moved(torch.ones(3, 2))
    cast = functools.partial(_initialize.to_type, torch.float16)
    assert _initialize.applier((batch,), cast)[0] is batch
    assert batch.x.dtype is torch.float16


def test_a_replaced_applier_may_pass_a_packed_sequence_to_its_function(monkeypatch):
    class Packed(nn.LSTM):
        def forward(self, packed):
            return super().forward(packed)[1][0]

    monkeypatch.setattr(_initialize, "applier", every_object_with_to)
    model = amp.initialize(Packed(2, 2), opt_level="O5", verbosity=0)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2)])
    assert model(packed).dtype is torch.float32
