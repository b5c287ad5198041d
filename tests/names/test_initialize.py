"""``amp.initialize``: apex's signature, levels and overrides, and what it refuses."""

import copy
import inspect
import re
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DataParallel, DistributedDataParallel

from apex import amp
from apex.parallel import LARC
from tests.support import loops
from tests.support.ranks import fake_group

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EMPTY = inspect.Parameter.empty
ARGUMENTS = {"models": EMPTY, "optimizers": None, "enabled": True, "opt_level": "O1"}
ARGUMENTS |= dict.fromkeys(("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32"))
ARGUMENTS |= dict.fromkeys(("master_weights", "loss_scale", "cast_model_outputs"))
ARGUMENTS |= {"num_losses": 1, "verbosity": 1, "min_loss_scale": None, "max_loss_scale": 2.0**24}
NAMES = (
    *("cast_model_type", "patch_torch_functions", "patch_torch_functions_type"),
    *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
)
COLUMNS = {
    "O0": (FP32, False, None, None, False, 1.0),
    "O1": (None, True, FP16, None, None, "dynamic"),
    "O2": (FP16, False, None, True, True, "dynamic"),
    "O3": (FP16, False, None, False, False, 1.0),
    "O4": (None, True, BF16, None, None, 1.0),
    "O5": (BF16, False, None, True, True, 1.0),
}


# -- arguments -------------------------------------------------------------------------------


def test_the_fourteen_arguments_have_apexs_order_and_defaults_and_others_are_keyword_only():
    parameters = inspect.signature(amp.initialize).parameters
    first = {k: p.default for k, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert [*first.items()] == [*ARGUMENTS.items()]
    assert all(p.kind is p.KEYWORD_ONLY for p in [*parameters.values()][14:])
    assert all(f"{name}:" in inspect.getdoc(amp.initialize) for name in parameters)
    read = inspect.getfullargspec(amp.initialize)  # by catalyst, which passes the defaults on
    assert (read.args, [*read.defaults]) == ([*first], [*first.values()][1:])  # models has none


@pytest.mark.parametrize("order", [(FP16,), ()])
def test_a_dtype_behind_patch_torch_functions_is_the_rocm_forks(order):
    """Its ``patch_torch_functions_type``; without one, the order is NVIDIA's."""
    model = loops.net()
    given = (True, "O4", None, True, *order, None, None, 8.0, FP32, 2, 0, 1.0, 2.0**10)
    amp.initialize(model, loops.sgd(model.parameters()), *given)
    properties = amp._amp_state.opt_properties
    assert properties.patch_torch_functions_type is (FP16 if order else BF16)
    assert (properties.loss_scale, properties.cast_model_outputs) == (8.0, FP32)
    assert (len(amp.state_dict()), amp._amp_state.max_loss_scale) == (2, 2.0**10)


@pytest.mark.parametrize("level", loops.LEVELS)
def test_fake_tensors_are_prepared_as_real_ones(level):
    def dtypes():
        model = loops.Net()
        model.register_buffer("positions", torch.arange(300.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        masters = optimizer.param_groups[0]["params"]
        tensors = (*model.parameters(), *model.buffers(), *masters)
        return [tensor.dtype for tensor in tensors]

    with FakeTensorMode():
        fake = dtypes()
    assert fake == dtypes()


def test_a_level_as_third_argument_is_a_truthy_enabled_and_runs_at_o1():
    model = loops.Net()
    with pytest.warns(UserWarning, match=r"the level is 'O1'\. Pass .*: opt_level='O5'") as caught:
        model, _ = amp.initialize(model, loops.sgd(model.parameters()), "O5", verbosity=0)
    assert caught[0].filename == __file__
    assert amp._amp_state.opt_properties.opt_level == "O1"
    other = loops.Net()
    # As MadryLab's robustness passes it.
    amp.initialize(other, loops.sgd(other.parameters()), "O1", verbosity=0)


# -- what comes back -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_same_objects_come_back_as_they_were_given(level, kind):
    model = loops.Net()
    optimizer = LARC(loops.sgd(model.parameters()))
    assert amp.initialize(model, optimizer, opt_level=level, verbosity=0) == (model, optimizer)
    alone = loops.Net()
    assert amp.initialize(alone, opt_level=level, verbosity=0) is alone
    assert amp.initialize(loops.Net(), [], opt_level=level, verbosity=0)[1] == []
    models = kind([loops.Net(), loops.Net()])
    optimizers = kind([loops.sgd(each.parameters()) for each in models])
    back = amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    assert back == (models, optimizers)
    assert all(type(each) is kind for each in back)


class Locked(list):
    """A group's parameters, which amp cannot exchange for masters."""

    def __setitem__(self, index, value):
        raise TypeError("locked")


@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_an_error_in_the_midst_of_it_leaves_everything_as_it_was(level):
    model = loops.Net()
    loops.small_loss(model).backward()  # gradients are there already
    parts = model.first, model.last
    optimizers = [loops.sgd(part.parameters(), momentum=0.9) for part in parts]
    optimizers[0].step()
    if level == "O4":
        users = types.SimpleNamespace(function=torch.sin)
        amp.register_half_function(users, "function")
        del users.function
    else:
        group = optimizers[1].param_groups[0]
        group["params"] = Locked(group["params"])
    before = copy.deepcopy([model.state_dict(), *(opt.state_dict() for opt in optimizers)])
    grads = [p.grad.clone() for p in model.parameters()]
    error, words = (AttributeError, "function") if level == "O4" else (TypeError, "locked")
    with loops.nothing_changes(model, *optimizers), pytest.raises(error, match=words):
        amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    after = [model.state_dict(), *(opt.state_dict() for opt in optimizers)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(map(torch.equal, (p.grad for p in model.parameters()), grads))
    loops.train(*loops.prepared("O5", model=model), data=loops.small_batches(3))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_error_leaves_the_fp32_values_that_an_earlier_call_keeps(level):
    shared = nn.BatchNorm1d(2)
    shared.running_mean.fill_(1 + 2**-12)
    options = {"opt_level": level, "keep_batchnorm_fp32": False, "verbosity": 0}
    amp.initialize(shared, **options)
    late = nn.Linear(2, 2)
    optimizer = loops.sgd(late.parameters())
    group = optimizer.param_groups[0]
    group["params"] = Locked(group["params"])
    with pytest.raises(TypeError, match="locked"):
        amp.initialize(nn.Sequential(shared, late), optimizer, **options)
    assert shared.state_dict()["running_mean"].eq(1 + 2**-12).all()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_weight_that_an_earlier_call_has_cast_is_cast_to_no_other_dtype(level):
    shared, optimizer = loops.prepared("O5")
    outer = nn.Sequential(shared[0], nn.Linear(2, 2))
    late = loops.sgd(outer[1].parameters())
    with loops.nothing_changes(shared, optimizer), pytest.raises(RuntimeError, match="an earlier"):
        amp.initialize(outer, late, opt_level=level, verbosity=0)


# -- levels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", loops.LEVELS)
def test_each_level_has_its_column_of_the_option_table(level):
    model, optimizer = loops.prepared(level, model=loops.Net())
    options = amp._amp_state.opt_properties
    assert tuple(getattr(options, name) for name in NAMES) == COLUMNS[level]
    assert (options.enabled, options.opt_level) == (True, level)
    norm = COLUMNS[level][0] if level == "O3" else FP32
    assert model.first.weight.dtype is (COLUMNS[level][0] or FP32)
    assert model.norm.weight.dtype is model.norm.running_mean.dtype is norm
    out = loops.LEVELS[level].compute if level in ("O1", "O4") else FP32
    assert model(torch.randn(3, 4)).dtype is out
    stepped = next(amp.master_params(optimizer))
    assert stepped.dtype is (FP16 if level == "O3" else FP32)
    assert (stepped is model.first.weight) is (level not in ("O2", "O5"))
    assert loops.scale() == (2.0**16 if COLUMNS[level][-1] == "dynamic" else 1.0)


@pytest.mark.parametrize("level", ["O6", "", "fp16", 1.5, None, True, b"O1", ["O1"]])
def test_an_unknown_level_lists_the_levels_and_tells_of_the_letter_o(level):
    model = loops.Net()
    words = re.escape(f"Unexpected optimization level {level!r}")
    with loops.nothing_changes(model), pytest.raises(RuntimeError, match=words) as e:
        amp.initialize(model, opt_level=level)
    assert all(f"'{known}'" in str(e.value) for known in loops.LEVELS)
    assert "is the letter O, not the number zero" in str(e.value)


OVERRIDES = [
    ("O0", {"master_weights": True}, True),
    ("O1", {"cast_model_type": FP32}, FP32),
    ("O1", {"patch_torch_functions": False}, False),
    ("O4", {"patch_torch_functions_type": FP16}, FP16),
    ("O1", {"cast_model_outputs": FP32}, FP32),
    ("O2", {"cast_model_type": False}, False),
    ("O2", {"cast_model_type": BF16}, BF16),
    ("O3", {"keep_batchnorm_fp32": "True"}, True),
    ("O4", {"loss_scale": "dynamic"}, "dynamic"),
]


@pytest.mark.parametrize(("level", "given", "shown"), OVERRIDES)
def test_an_accepted_override_changes_that_property_alone_and_trains(level, given, shown):
    model, optimizer = loops.prepared(level, model=loops.Net(), **given)
    options = amp._amp_state.opt_properties.options
    expected = {**dict(zip(NAMES, COLUMNS[level], strict=True)), "cast_model_outputs": None}
    assert {name: options[name] for name in expected} == {**expected, **dict.fromkeys(given, shown)}
    losses = loops.train(model, optimizer, data=loops.small_batches(6))
    assert losses[-1] < losses[0]


class Takes(nn.Linear):
    """Records the dtype that its forward gets, and computes in the level's 16-bit type."""

    def forward(self, x, *, scale):
        self.taken = x.dtype, scale["by"].dtype
        return {"out": super().forward(x), "taken": x.long()}


@pytest.mark.parametrize("given", [torch.float64, FP16, BF16])
def test_fp32_as_model_type_at_o1_casts_the_models_inputs_and_outputs(given):
    model = Takes(2, 2)
    amp.initialize(model, opt_level="O1", cast_model_type=FP32, verbosity=0)
    out = model(torch.ones(3, 2, dtype=given), scale={"by": torch.ones(1, dtype=given)})
    assert model.taken == (FP32, FP32)
    assert (out["out"].dtype, out["taken"].dtype) == (FP32, torch.int64)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, torch.float64])
def test_outputs_have_the_dtype_that_is_asked_for(level, dtype):
    model, _ = loops.prepared(level, model=loops.Net(), cast_model_outputs=dtype)
    assert model(torch.randn(3, 4)).dtype is dtype


@pytest.mark.parametrize("given", [128, "128.0", "1.28e2", np.int64(128), np.float32(128.0)])
def test_a_loss_scale_may_be_a_number_or_a_string_of_one(given):
    model, optimizer = loops.prepared("O2", model=loops.Net(), loss_scale=given)
    loss = loops.small_loss(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == loss * 128.0


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_16_bit_parameters_stay_where_scripts_allow_models_that_are_not_fp32(level):
    amp._amp_state.allow_incoming_model_not_fp32 = True
    dtype = BF16 if level == "O4" else FP16
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype)
    model[0].weight.data = model[0].weight.data.float()
    before = [p.dtype for p in model.parameters()]
    options = {"opt_level": level, "loss_scale": 8.0, "verbosity": 0}
    model, optimizer = amp.initialize(model, loops.sgd(model.parameters()), **options)
    loops.descend(sum(p.float().sum() for p in model.parameters()), optimizer)
    assert [p.dtype for p in model.parameters()] == before
    assert all(p.grad.eq(1.0).all() for p in model.parameters())
    amp.restore(model, optimizer)
    assert [p.dtype for p in model.parameters()] == before
    double = amp.initialize(loops.Net().double(), opt_level="O1", verbosity=0)
    assert double.first.weight.dtype is torch.float64


# -- refusals --------------------------------------------------------------------------------


def refused(error, words, models, optimizers=None, *, level="O5", **kwargs):
    """Fails unless ``initialize`` raises ``error`` with these words and changes nothing."""
    parts = [part if type(part) is list else [part] for part in (models, optimizers)]
    with loops.nothing_changes(*parts[0], *parts[1]), pytest.raises(error, match=words) as e:
        amp.initialize(models, optimizers, opt_level=level, **kwargs)
    assert type(e.value) is error


MEANINGLESS = [
    ("O1", {"keep_batchnorm_fp32": False}),
    ("O4", {"keep_batchnorm_fp32": True}),
    ("O1", {"master_weights": False}),
    ("O1", {"cast_model_type": BF16}),
    ("O2", {"patch_torch_functions": True}),
    ("O5", {"patch_torch_functions_type": BF16}),
]


@pytest.mark.parametrize(("level", "given"), MEANINGLESS)
def test_overrides_without_a_meaning_are_refused_and_warn_under_a_hard_override(level, given):
    ((name, value),) = given.items()
    instead = {"O1": "'O2'", "O4": "'O5'"}.get(level, r"'O1' \(fp16\) or 'O4'")
    words = f"{name}={value} has no meaning at {level}.*Leave it None, or use opt_level {instead}"
    refused(RuntimeError, words, loops.Net(), level=level, **given)
    amp._amp_state.hard_override = True
    with pytest.warns(UserWarning, match=f"{name}={value} has no meaning"):
        loops.prepared(level, model=loops.Net(), **given)


BAD_VALUES = [
    (TypeError, {"keep_batchnorm_fp32": "true"}, "a bool, or the string 'True' or 'False'"),
    (TypeError, {"enabled": ["optimizer"]}, "a bool, or the string"),
    (TypeError, {"cast_model_type": "half"}, r"torch\.float16, torch\.bfloat16, torch\.float3"),
    (TypeError, {"cast_model_outputs": torch.int32}, "a floating-point torch.dtype or None"),
    (TypeError, {"patch_torch_functions_type": FP32}, r"torch\.float16 or torch\.bfloat16"),
    (TypeError, {"max_loss_scale": "3"}, "a number"),
    (TypeError, {"growth_interval": 2.5}, "an integer"),
    (TypeError, {"fp32_modules": "first"}, "it accepts a sequence"),
    (TypeError, {"verbosity": "loud"}, "an integer"),
    (ValueError, {"loss_scale": "abc"}, "positive, finite number.*, or a string with one"),
    (ValueError, {"loss_scale": "nan"}, "positive, finite"),
    (ValueError, {"growth_factor": 1.0}, "growth_factor is 1.0; it must be above 1"),
    (ValueError, {"growth_interval": 0}, "growth_interval is 0; it must be at least 1"),
    (ValueError, {"backoff_factor": 0.0}, r"in \(0, 1\)"),
    (ValueError, {"max_loss_scale": -1.0}, "max_loss_scale is -1.0; it must be a positive"),
    (ValueError, {"backoff_factor": 1.0}, r"in \(0, 1\)"),
    (ValueError, {"min_loss_scale": 2.0**25}, "min_loss_scale is 33554432.0; it must be at mo"),
    (ValueError, {"num_losses": -1}, "num_losses is -1; it must be an integer of at least 0"),
]


@pytest.mark.parametrize(("error", "given", "words"), BAD_VALUES)
def test_a_bad_value_is_refused_with_what_is_accepted(error, given, words):
    level = "O1" if "patch_torch_functions_type" in given else "O2"
    refused(error, words, loops.Net(), level=level, **given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bad_models_are_refused(level, monkeypatch):
    model = loops.Net()
    words = "wrapped in DataParallel.*Call amp.initialize first, then wrap"
    refused(RuntimeError, words, DataParallel(model), loops.sgd(model.parameters()), level=level)
    words = r"\.weight is on the meta device.*to_empty\(device=\.\.\.\)"
    refused(RuntimeError, words, loops.Net().to("meta"), level=level)
    words = "uninitialized parameter.*When using LazyModules Call `forward` with a dummy batch"
    refused(ValueError, words, nn.Sequential(nn.LazyLinear(2)), level=level)
    lazy = nn.Sequential(nn.LazyBatchNorm1d(affine=False))
    refused(ValueError, "uninitialized parameter", lazy, level=level)
    refused(ValueError, "same model twice. Pass each model once", [model, model], level=level)
    refused(TypeError, "got int instead of a model", [loops.Net(), 3], level=level)
    refused(TypeError, "got the class Linear instead of a model.*first", nn.Linear, level=level)
    refused(RuntimeError, "scripted model", torch.jit.script(nn.Linear(1, 1)), level=level)
    if level == "O1":
        words = r"last\.weight is float64.*model\.float\(\) first, or use a level"
        model.last.double()
        refused(RuntimeError, words, model, loops.sgd(model.parameters()), level=level)
    with torch.inference_mode():
        refused(RuntimeError, "inference_mode.*before the block", loops.Net(), level=level)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)  # torch 2.9 warns in `flags`
    words = r"needs torch\.backends\.cudnn\.enabled = True"
    refused(RuntimeError, words, loops.Net(), level=level)


def test_a_distributed_data_parallel_model_is_refused():
    with fake_group(0, 1):
        model = DistributedDataParallel(loops.Net())
        words = "wrapped in DistributedDataParallel.*then wrap"
        refused(RuntimeError, words, model, loops.sgd(model.parameters()))


@pytest.mark.parametrize(("first", "level"), [("O2", "O5"), ("O5", "O1"), ("O1", "O2")])
def test_prepared_models_are_refused_where_a_level_is_16_bit(first, level):
    model, optimizer = loops.prepared(first, model=loops.Net())
    words = r"Net, which it has already prepared\..*amp\.restore\(model, optimizer\)"
    refused(RuntimeError, words, model, level=level)
    words = r"optimizer \(SGD\).*already prepared.*before the training loop.*amp\.restore\(model, "
    refused(RuntimeError, words, loops.Net(), LARC(optimizer), level=level)


def test_bad_optimizers_are_refused(level):
    model = loops.Net()
    optimizer = loops.sgd(model.parameters())
    words = "got the class SGD instead of an optimizer.*torch.optim.Optimizer"
    refused(TypeError, words, model, torch.optim.SGD, level=level)
    refused(TypeError, "got NoneType instead of an opt", model, [optimizer, None], level=level)
    refused(TypeError, "got dict instead of an optimizer", model, {"sgd": optimizer}, level=level)
    scheduler = torch.optim.lr_scheduler.StepLR(loops.sgd(model.parameters()), 1)
    refused(TypeError, "got StepLR instead of an optimizer", model, scheduler, level=level)
    words = r"optimizer \(SGD\) that holds no parameter of the given models\. Pass the model that"
    refused(ValueError, words, model, loops.sgd(loops.Net().parameters()), level=level)
    refused(ValueError, "optimizer twice", model, [optimizer, LARC(optimizer)], level=level)
    for given in (0, 1.5, "2", True, None):
        words = f"num_losses is {given!r}; it must be an integer of at least 1"
        refused(ValueError, words, model, optimizer, level=level, num_losses=given)
    optimizer.param_groups[0]["params"].clear()
    words = r"optimizer \(SGD\) without parameters\. Create it with the model's parameters"
    refused(ValueError, words, model, optimizer, level=level)
