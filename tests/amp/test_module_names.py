"""The modules of apex.amp that scripts import, often by an editor's own doing."""

import importlib

import pytest
import torch

from apex import amp
from apex.amp import compat, frontend, handle, opt, rnn_compat, scaler, utils, wrap
from apex.amp._amp_state import _amp_state, master_params, maybe_print, warn_or_err
from apex.amp._initialize import to_type

MODULES = [
    *("_amp_state", "_initialize", "amp", "compat", "frontend", "handle", "lists", "opt"),
    *("rnn_compat", "scaler", "utils", "wrap", "__version__"),
]
HALF, FULL = torch.ones(2, dtype=torch.float16), torch.ones(2)


@pytest.mark.parametrize("name", MODULES)
def test_the_module_imports(name):
    assert importlib.import_module(f"apex.amp.{name}").__name__ == f"apex.amp.{name}"


@pytest.mark.parametrize("name", ["compat", "opt", "rnn_compat", "scaler", "utils", "wrap"])
def test_the_module_is_an_attribute(name):
    assert vars(amp)[name].__name__ == f"apex.amp.{name}"


@pytest.mark.parametrize("name", frontend.__all__)
def test_the_module_amp_has_the_names_of_frontend(name):
    """``from apex.amp import amp`` then ``amp.initialize`` works in apex, whose amp.py has them."""
    from apex.amp import amp as module

    assert getattr(module, name) is getattr(frontend, name)


def test_the_version_is_a_string_of_the_tuple():
    from apex.amp.__version__ import VERSION, __version__

    assert __version__ == ".".join(map(str, VERSION))


def test_filter_attrs_keeps_the_names_that_are_there():
    assert compat.filter_attrs(torch, ["mm", "no_such_function", "exp"]) == ["mm", "exp"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (compat.variable_is_tensor, True),
        (compat.tensor_is_variable, True),
        (compat.tensor_is_float_tensor, False),
        (rnn_compat.has_old_rnns, False),
        (utils.is_cuda_enabled, torch.version.cuda is not None),
    ],
)
def test_what_torch_is_like_is_told_for_today(answer, expected):
    assert answer() is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(HALF, True), (torch.ones(2, dtype=torch.int64), False), (1.0, False), (None, False)],
)
def test_is_floating_point_is_for_tensors(value, expected):
    assert compat.is_floating_point(value) is expected
    assert utils.is_fp_tensor(value) is expected


def test_a_list_is_an_fp_tensor_when_all_its_items_are():
    assert utils.is_fp_tensor([HALF, (FULL,)])
    assert not utils.is_fp_tensor([HALF, torch.ones(1, dtype=torch.bool)])
    assert utils.is_nested([])
    assert not utils.is_nested(HALF)


def test_is_tensor_like_is_true_of_tensors_alone():
    assert compat.is_tensor_like(HALF)
    assert not compat.is_tensor_like([1.0])


def test_scalar_python_val_reads_0d_tensors():
    assert compat.scalar_python_val(torch.tensor(2.5)) == 2.5
    assert compat.scalar_python_val(3) == 3


def test_type_string_is_the_last_word_of_the_type():
    assert utils.type_string(HALF) == "HalfTensor"


@pytest.mark.parametrize(
    ("cast", "dtype"), [(utils.maybe_half, torch.float16), (utils.maybe_float, torch.float32)]
)
def test_maybe_casts_reach_floating_tensors_in_lists(cast, dtype):
    count = torch.ones(1, dtype=torch.int64)
    first, (second, third), text = cast([HALF, (FULL, count), "text"])
    assert (first.dtype, second.dtype, third, text) == (dtype, dtype, count, "text")


def test_a_cast_wrapper_casts_while_casts_are_on():
    dtype_of = wrap.make_cast_wrapper(lambda x, name=None: x.dtype, utils.maybe_half)
    assert dtype_of(FULL) is torch.float32
    model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert dtype_of(FULL, name="kept") is torch.float16
    amp.restore(model)


def test_a_promote_wrapper_widens_while_casts_are_on():
    dtypes_of = wrap.make_promote_wrapper(lambda *xs: [x.dtype for x in xs], utils.maybe_float)
    model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert dtypes_of(HALF, FULL) == [torch.float32] * 2
    amp.restore(model)


def test_a_wrapper_that_replaced_torch_functions_says_what_to_use():
    with pytest.raises(AttributeError, match=r"amp\.register_half_function"):
        _ = wrap.cached_cast


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        (utils, "set_func_save", r"amp\.register_half_function"),
        (rnn_compat, "whitelist_rnn_cells", "torch's RNNs"),
        (importlib.import_module("apex.amp._initialize"), "_initialize", r"amp\.initialize"),
    ],
)
def test_a_name_that_is_not_here_says_what_to_use(module, name, use):
    with pytest.raises(AttributeError, match=rf"\.{name} is not part of this apex: use {use}"):
        getattr(module, name)
    assert not hasattr(module, "no_such_name")


# -- utils -----------------------------------------------------------------------------------


def test_weights_in_fp32_are_worth_caching():
    weight = torch.nn.Parameter(FULL)
    assert utils.should_cache([weight, (weight,)])
    assert not any(map(utils.should_cache, (FULL, torch.nn.Parameter(HALF), [weight, FULL])))


def test_types_of_floating_tensors_are_collected():
    found = utils.collect_fp_tensor_types([HALF, [FULL, (HALF,)], 3], {"x": torch.ones(1).double()})
    assert found == {"HalfTensor", "FloatTensor", "DoubleTensor"}
    assert utils.collect_fp_tensor_types([torch.ones(1, dtype=torch.int64)], {}) == set()


def test_a_cached_cast_is_made_once_and_again_where_it_lacks_a_gradient():
    weight, cache = torch.nn.Parameter(FULL.clone()), {}
    with torch.no_grad():
        first = utils.cached_cast(utils.maybe_half, weight, cache)
        assert utils.cached_cast(utils.maybe_half, weight, cache) is first
    (second,) = utils.cached_cast(utils.maybe_half, [weight], cache)
    assert second.requires_grad
    assert utils.cached_cast(utils.maybe_half, weight, cache) is second


def test_functions_are_asked_got_and_set_by_name():
    class Space:
        kept = 1

    for space in (Space, {"kept": 1}):
        assert (utils.has_func(space, "kept"), utils.has_func(space, "other")) == (True, False)
        utils.set_func(space, "kept", 2)
        assert utils.get_func(space, "kept") == 2
    assert list(utils.as_inplace(["add", "mul"])) == ["add_", "mul_"]


def test_verbosify_binds_name_and_verbose():
    def cast(x, name="", verbose=False):
        return x, name, verbose

    assert utils.verbosify(cast, "mm", verbose=True)(1) == (1, "mm", True)
    assert utils.verbosify(cast, "mm", verbose=False) is cast


def test_the_cuda_version_is_numbers():
    assert utils.get_cuda_version() == tuple(
        int(part) for part in (torch.version.cuda or "").split(".") if part
    )


# -- _amp_state, _initialize -----------------------------------------------------------------


def test_maybe_print_follows_verbosity(capsys):
    for verbosity, text in ((1, "told"), (0, "kept")):
        _amp_state.verbosity = verbosity
        maybe_print(text)
        maybe_print(text, rank0=True)
    assert capsys.readouterr().out == "told\ntold\n"


def test_warn_or_err_raises_unless_overridden():
    with pytest.raises(RuntimeError, match="no sense"):
        warn_or_err("no sense")
    _amp_state.hard_override = True
    with pytest.warns(UserWarning, match="no sense"):
        warn_or_err("no sense")


def test_master_params_is_reached_by_its_old_path():
    assert master_params is amp.master_params


def test_to_type_casts_floating_tensors_and_leaves_others():
    count = torch.ones(1, dtype=torch.int64)
    assert to_type(torch.float16, FULL).dtype is torch.float16
    assert to_type(torch.float16, count) is count


# -- frontend --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_level_s_object_sets_the_options_that_initialize_reports(level):
    options = frontend.opt_levels[level](frontend.Properties())
    assert isinstance(frontend.opt_levels[level], getattr(frontend, level))
    model = amp.initialize(torch.nn.Linear(1, 1), opt_level=level, verbosity=0)
    assert options.options == _amp_state.opt_properties.options
    assert frontend.opt_levels[level].brief.startswith(f"{level}:  ")
    amp.restore(model)


def test_properties_start_disabled_and_take_no_unknown_option():
    options = frontend.Properties()
    assert (options.enabled, options.opt_level, options.loss_scale) == (False, None, 1.0)
    with pytest.raises(ValueError, match="'no_option' is not an option; the options are enabled"):
        options._update_options_dict([("no_option", 1)])


def test_state_dict_fills_a_destination():
    model = amp.initialize(torch.nn.Linear(1, 1), opt_level="O2", verbosity=0)
    destination = {"kept": 1}
    assert amp.state_dict(destination) is destination
    assert list(destination) == ["kept", "loss_scaler0"]
    amp.restore(model)


# -- handle, opt -----------------------------------------------------------------------------


def test_a_handle_can_be_made_with_apex_s_arguments():
    made = handle.AmpHandle(8.0, enable_caching=False, verbose=True)
    assert (made.is_active(), made.has_cache, made.verbose, made.cache) == (True, False, True, {})
    assert (FULL @ FULL).dtype is torch.float16
    made.remove_cache(FULL)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with made.scale_loss(weight.sum(), optimizer) as scaled_loss:
        assert scaled_loss == 8.0
        scaled_loss.backward()
    assert weight.grad == 1.0
    made._deactivate()
    assert (FULL @ FULL).dtype is torch.float32
    assert not handle.NoOpHandle().has_cache


@pytest.mark.parametrize("make", [handle.AmpHandle, handle.NoOpHandle])
def test_a_wrapped_optimizer_can_be_made_from_a_handle(make):
    owner = make()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = opt.OptimWrapper(torch.optim.SGD([weight], lr=0.5), owner, 1)
    with optimizer.scale_loss(weight.float().sum()) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert weight == 0.5
    optimizer.zero_grad()
    assert weight.grad is None
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.param_groups) == 2
    owner._deactivate()


def test_scaler_and_wrapper_are_reached_by_their_old_paths():
    assert handle.OptimWrapper is opt.OptimWrapper
    assert handle.LossScaler is opt.LossScaler is scaler.LossScaler
