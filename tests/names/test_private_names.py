"""The names behind the public ones that scripts use: ``_amp_state``, ``_amp_stash``, modules."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex.amp import _initialize, frontend, handle, opt, scaler
from apex.amp._amp_state import _amp_state, master_params
from apex.parallel import LARC
from tests.support import loops

level = loops.at_levels(*loops.LEVELS)


# -- modules ---------------------------------------------------------------------------------


def test_modules_and_names_are_where_apex_had_them():
    for name in (
        *("_amp_state", "_initialize", "amp", "frontend", "handle", "lists", "opt", "scaler"),
        *("compat", "rnn_compat", "utils", "wrap", "__version__"),
    ):
        assert importlib.import_module(f"apex.amp.{name}").__name__ == f"apex.amp.{name}"
    for name in ("opt", "scaler", "compat", "rnn_compat", "utils", "wrap"):
        assert vars(amp)[name].__name__ == f"apex.amp.{name}"
    for name in ("state_dict", "load_state_dict", "initialize", "_amp_state", "lists"):
        assert name in vars(amp)
    module = importlib.import_module("apex.amp.amp")  # scripts import it as amp
    assert all(getattr(module, name) is getattr(frontend, name) for name in frontend.__all__)
    assert amp._amp_state is _amp_state
    assert master_params is amp.master_params
    assert handle.OptimWrapper is opt.OptimWrapper
    assert handle.LossScaler is opt.LossScaler is scaler.LossScaler


MISSING = [
    (_initialize, "_initialize", r"amp\.initialize"),
    (scaler, "scale_check_overflow_python", r"LossScaler\.unscale"),
    (amp.wrap, "cached_cast", r"amp\.register_half_function"),
]


@pytest.mark.parametrize(("module", "name", "use"), MISSING)
def test_a_name_that_is_not_here_says_what_to_use(module, name, use):
    with pytest.raises(AttributeError, match=rf"{name} is not .*: .*use {use}"):
        getattr(module, name)


def test_helpers_of_casts_that_scripts_import_do_as_in_apex():
    half = torch.ones(1).half()
    assert amp.utils.is_fp_tensor([half, (half.float(),)])
    assert not any(map(amp.utils.is_fp_tensor, (1.0, half.int(), [half, None])))
    assert amp.compat.filter_attrs(torch.Tensor, ["__matmul__", "no_such"]) == ["__matmul__"]
    assert amp.rnn_compat.has_old_rnns() is False


def test_a_levels_object_sets_the_options_that_initialize_reports(level):
    options = frontend.opt_levels[level](frontend.Properties())
    assert isinstance(frontend.opt_levels[level], getattr(frontend, level))
    assert frontend.opt_levels[level].brief.startswith(f"{level}:  ")
    keep = loops.prepared(level, model=loops.Net())
    assert options.options == _amp_state.opt_properties.options
    del keep
    unset = frontend.Properties()
    assert (unset.enabled, unset.opt_level, unset.loss_scale) == (False, None, 1.0)


# -- _amp_state ------------------------------------------------------------------------------


def test_opt_properties_read_as_attributes_and_as_options():
    assert not hasattr(_amp_state, "opt_properties")
    _keep = loops.prepared("O5", model=loops.Net())
    properties = _amp_state.opt_properties
    assert properties.opt_level == properties.options["opt_level"] == "O5"
    with pytest.raises(AttributeError, match=r"no option 'opt_lvl'; the options are enabled,"):
        _ = properties.opt_lvl
    for duplicate in (copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        assert duplicate(properties).opt_level == "O5"


def test_models_of_a_deactivated_handle_cast_and_scale_as_a_later_call_says():
    first, optimizer = loops.prepared("O1")
    _amp_state.handle._deactivate()
    x = torch.ones(2, 4)
    assert first(x).dtype is torch.float32
    second, _ = loops.prepared("O1", loss_scale=4.0)
    assert first(x).dtype is second(x).dtype is torch.float16
    with amp.scale_loss(first(x).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert scaled_loss == 4.0 * first(x).float().sum()


def test_the_handle_is_active_where_functions_cast_until_it_is_deactivated(level):
    model, _ = loops.prepared(level, model=loops.Net())
    own, casts = _amp_state.handle, level in ("O1", "O4")
    assert own.is_active() is own._is_active is casts
    own._deactivate()
    assert (own.is_active(), own._is_active) == (False, False)
    x = torch.ones(2, 2)
    assert (x @ x).dtype is model(torch.ones(2, 4)).dtype is torch.float32


# -- master_params, _initialize.applier ------------------------------------------------------


def test_master_params_take_any_optimizer_and_larc():
    model = loops.Net()
    for optimizer in (
        torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1),
        LARC(loops.sgd(model.parameters())),
    ):
        assert all(map(lambda a, b: a is b, amp.master_params(optimizer), model.parameters()))
    for given, words in ((model, "got the model Net"), ([1], "got list")):
        with pytest.raises(TypeError, match=f"{words}; it takes an optimizer"):
            list(amp.master_params(given))


class Batch:
    """A batch type of a script's own, that the walk over containers does not know."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        raise TypeError(f"{device} is no device")


class BatchNet(nn.Linear):
    def forward(self, batch):
        self.taken = batch.x.dtype
        return Batch(super().forward(batch.x))


def applier(value, fn):
    if isinstance(value, Batch):
        return Batch(fn(value.x))
    nested = isinstance(value, tuple)
    return tuple(applier(v, fn) for v in value) if nested else kept_applier(value, fn)


kept_applier = _initialize.applier


def test_a_replaced_applier_casts_inputs_and_outputs(monkeypatch):
    monkeypatch.setattr(_initialize, "applier", applier)
    model = amp.initialize(BatchNet(2, 2), opt_level="O5", verbosity=0)
    assert model(Batch(torch.ones(3, 2))).x.dtype is torch.float32
    assert model.taken is torch.bfloat16


# -- optimizer._amp_stash --------------------------------------------------------------------


def test_the_stash_is_there_between_initialize_and_restore():
    model = loops.Net()
    optimizer = loops.sgd(model.parameters())
    amp.initialize(model, optimizer, enabled=False)
    assert not hasattr(optimizer, "_amp_stash")
    larc = LARC(optimizer)
    amp.initialize(model, larc, opt_level="O5", verbosity=0)
    stash = larc._amp_stash
    assert stash is optimizer._amp_stash
    stash.mark = 3
    for name in ("lazy_init_called", "already_patched"):
        assert getattr(stash, name)
        setattr(stash, name, False)
    assert (optimizer._amp_stash.mark, optimizer._amp_stash.lazy_init_called) == (3, False)
    amp.restore(model, optimizer)
    assert not hasattr(optimizer, "_amp_stash")


def ids(params):
    return [*map(id, params)]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_stash_lists_pairs_in_one_order(level):
    model = loops.Net()
    model.last.weight.requires_grad_(False)
    named = [*model.named_parameters()]
    groups = [{"params": [p for n, p in named if n.endswith(k)]} for k in ("weight", "bias")]
    optimizer = loops.sgd(groups)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    stash = optimizer._amp_stash
    low = [model.first.weight, model.first.bias, model.last.bias]
    assert ids(stash.all_fp16_params) == ids(low)
    direct = [p for p in stash.all_fp32_from_fp32_params if p.requires_grad]
    assert ids(direct) == ids([model.norm.weight, model.norm.bias])
    assert [*map(ids, stash.fp16_groups)] == [ids(low[:1]), ids(low[1:])]
    first, last = map(ids, stash.fp32_from_fp16_groups)
    assert first + last == ids(stash.all_fp32_from_fp16_params)
    pairs = zip(low, stash.all_fp32_from_fp16_params, strict=True)
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in pairs)
    stepped = {id(p) for p in amp.master_params(optimizer) if p.requires_grad}
    assert {id(p) for p in stash.all_fp32_params if p.requires_grad} == stepped
    extra = nn.Parameter(torch.ones(2, dtype=model.first.weight.dtype))
    optimizer.add_param_group({"params": [extra]})
    assert optimizer._amp_stash.all_fp16_params[-1] is extra


def test_private_methods_do_as_in_apex(level):
    model, optimizer = loops.one_weight(level, loss_scale=8.0)
    for _ in range(2):
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_lazy_init()
    assert optimizer._amp_stash.lazy_init_called
    for total in (0.5, 1.0):
        optimizer._prepare_amp_backward()
        (loops.slope(model, 0.5) * 8.0).backward()
        optimizer._post_amp_backward(_amp_state.loss_scalers[0])
        assert [p.grad.item() for p in amp.master_params(optimizer)] == [total]
    with torch.no_grad():
        next(amp.master_params(optimizer)).fill_(0.1)
    optimizer._master_params_to_model_params()
    assert model.weight == torch.tensor(0.1).to(model.weight.dtype)
