import re

import numpy as np
import pytest
import torch
from torch import nn

import apex.amp as amp
from tests.amp.cases import LEVELS, LOW, Net, loss_of, nothing_changes, prepared, scale, sgd, train

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
COLUMNS = {
    "O0": (FP32, False, None, None, False, 1.0),
    "O1": (None, True, FP16, None, None, "dynamic"),
    "O2": (FP16, False, None, True, True, "dynamic"),
    "O3": (FP16, False, None, False, False, 1.0),
    "O4": (None, True, BF16, None, None, 1.0),
    "O5": (BF16, False, None, True, True, 1.0),
}
PROPERTIES = (
    "cast_model_type",
    "patch_torch_functions",
    "patch_torch_functions_type",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


# -- the option table ------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_has_its_column_of_the_option_table(level):
    keep = prepared(level)
    options = amp._amp_state.opt_properties
    assert tuple(getattr(options, name) for name in PROPERTIES) == COLUMNS[level]
    assert (options.enabled, options.opt_level) == (True, level)
    del keep


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_have_the_dtype_of_their_level(level):
    model, _ = prepared(level)
    expected = COLUMNS[level][0] or FP32
    assert model.first.weight.dtype is expected
    assert model.norm.weight.dtype is (expected if level == "O3" else FP32)
    assert model.norm.running_mean.dtype is (expected if level == "O3" else FP32)


@pytest.mark.parametrize("level", LEVELS)
def test_outputs_have_the_dtype_of_their_level(level):
    model, _ = prepared(level)
    assert model(torch.randn(3, 4)).dtype is (LOW[level] if level in ("O1", "O4") else FP32)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_moved_to_the_gpu_after_initialize_computes_there_in_the_same_dtype(level):
    model, optimizer = prepared(level, loss_scale=128.0)
    model.cuda()
    seen = []
    model.first.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    before = model.state_dict()["last.bias"].clone()
    with amp.scale_loss(model(torch.randn(3, 4).cuda()).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert seen == [COLUMNS[level][2] or COLUMNS[level][0] or FP32]
    after = model.state_dict()["last.bias"].cuda()
    torch.testing.assert_close(after, before.cuda() - 0.125 * 3, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("level", LEVELS)
def test_the_optimizer_holds_fp32_masters_where_the_level_has_them(level):
    model, optimizer = prepared(level)
    stepped = next(amp.master_params(optimizer))
    assert stepped.dtype is (FP16 if level == "O3" else FP32)
    assert (stepped is model.first.weight) is (level not in ("O2", "O5"))


@pytest.mark.parametrize("level", LEVELS)
def test_the_scale_starts_at_the_level_s_own(level):
    keep = prepared(level)
    assert scale() == (2.0**16 if COLUMNS[level][-1] == "dynamic" else 1.0)
    del keep


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains(level):
    model, optimizer = prepared(level)
    losses = train(model, optimizer, steps=8)
    assert losses[-1] < 0.9 * losses[0]


# -- levels that do not exist ----------------------------------------------------------------


@pytest.mark.parametrize("level", ["O6", "o9", "", "fp16", 1.5, None, True, 7, b"O1", ["O1"]])
def test_an_unknown_level_lists_the_levels_and_tells_of_the_letter_o(level):
    model = Net()
    with (
        nothing_changes(model),
        pytest.raises(
            RuntimeError, match=re.escape(f"Unexpected optimization level {level!r}")
        ) as e,
    ):
        amp.initialize(model, opt_level=level)
    assert all(f"'{known}'" in str(e.value) for known in LEVELS)
    assert "is the letter O, not the number zero" in str(e.value)


@pytest.mark.parametrize("level", LEVELS)
def test_near_misses_are_told_the_level_that_was_meant(level):
    digit = level[1]
    for near in (f"0{digit}", f"o{digit}", int(digit), digit, f" {level} "):
        with pytest.raises(RuntimeError, match=f"Did you mean '{level}'.*letter O"):
            amp.initialize(Net(), opt_level=near)


# -- overrides that are accepted -------------------------------------------------------------


ACCEPTED = [
    ("O0", {"cast_model_type": FP16}, {"cast_model_type": FP16}),
    ("O0", {"master_weights": True}, {"master_weights": True}),
    ("O0", {"loss_scale": 128}, {"loss_scale": 128.0}),
    ("O0", {"patch_torch_functions": False}, {"patch_torch_functions": False}),
    ("O1", {"cast_model_type": FP32}, {"cast_model_type": FP32}),
    ("O1", {"cast_model_type": False}, {"cast_model_type": None}),
    ("O1", {"patch_torch_functions": False}, {"patch_torch_functions": False}),
    ("O1", {"patch_torch_functions_type": BF16}, {"patch_torch_functions_type": BF16}),
    ("O4", {"patch_torch_functions_type": FP16}, {"patch_torch_functions_type": FP16}),
    ("O1", {"loss_scale": "128.0"}, {"loss_scale": 128.0}),
    ("O1", {"cast_model_outputs": FP32}, {"cast_model_outputs": FP32}),
    ("O2", {"cast_model_type": False}, {"cast_model_type": False}),
    ("O2", {"cast_model_type": BF16}, {"cast_model_type": BF16}),
    ("O5", {"cast_model_type": FP16}, {"cast_model_type": FP16}),
    ("O2", {"keep_batchnorm_fp32": "False"}, {"keep_batchnorm_fp32": False}),
    ("O3", {"keep_batchnorm_fp32": "True"}, {"keep_batchnorm_fp32": True}),
    ("O3", {"keep_batchnorm_fp32": True}, {"keep_batchnorm_fp32": True}),
    ("O3", {"master_weights": True}, {"master_weights": True}),
    ("O3", {"loss_scale": "dynamic"}, {"loss_scale": "dynamic"}),
    ("O4", {"loss_scale": "dynamic"}, {"loss_scale": "dynamic"}),
    ("O5", {"master_weights": False}, {"master_weights": False}),
    ("O5", {"cast_model_outputs": BF16}, {"cast_model_outputs": BF16}),
]


@pytest.mark.parametrize(("level", "given", "shown"), ACCEPTED)
def test_an_accepted_override_changes_that_property_alone(level, given, shown):
    keep = prepared(level, **given)
    options = amp._amp_state.opt_properties.options
    expected = {**dict(zip(PROPERTIES, COLUMNS[level], strict=True)), "cast_model_outputs": None}
    assert {name: options[name] for name in expected} == {**expected, **shown}
    del keep


@pytest.mark.parametrize(("level", "given", "shown"), ACCEPTED)
def test_training_works_under_an_accepted_override(level, given, shown):
    model, optimizer = prepared(level, **given)
    losses = train(model, optimizer, steps=6)
    assert losses[-1] < losses[0]


def test_no_function_patching_at_o1_computes_in_fp32():
    model, _ = prepared("O1", patch_torch_functions=False)
    assert model(torch.randn(3, 4)).dtype is FP32
    assert not torch.is_autocast_enabled("cpu")


class Takes(nn.Linear):
    """Records the dtype that its forward gets, and computes in the level's 16-bit type."""

    def forward(self, x, *, scale):
        self.taken = x.dtype, scale["by"].dtype
        return {"out": super().forward(x), "taken": x.long()}


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("given", [torch.float64, FP16, BF16])
def test_fp32_as_model_type_at_o1_casts_the_model_s_inputs_and_outputs(level, given):
    model = Takes(2, 2)
    amp.initialize(model, opt_level=level, cast_model_type=FP32, verbosity=0)
    out = model(torch.ones(3, 2, dtype=given), scale={"by": torch.ones(1, dtype=given)})
    assert model.taken == (FP32, FP32)
    assert (out["out"].dtype, out["taken"].dtype) == (FP32, torch.int64)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is LOW[level]


def test_model_outputs_keep_their_own_type_beside_it():
    model = nn.Linear(2, 2)
    amp.initialize(
        model, opt_level="O4", cast_model_type=FP32, cast_model_outputs=FP16, verbosity=0
    )
    assert model(torch.ones(3, 2)).dtype is FP16


def test_no_cast_at_o2_leaves_the_model_in_fp32():
    model, _ = prepared("O2", cast_model_type=False)
    assert {p.dtype for p in model.parameters()} == {FP32}


def test_half_at_o0_casts_the_model():
    model, _ = prepared("O0", cast_model_type=FP16)
    assert {p.dtype for p in model.parameters()} == {FP16}


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_masters_at_o0_and_o3(level):
    _, optimizer = prepared(level, master_weights=True)
    assert {p.dtype for p in amp.master_params(optimizer)} == {FP32}


def test_bfloat16_at_o2_trains_with_masters():
    model, optimizer = prepared("O2", cast_model_type=BF16)
    assert model.first.weight.dtype is BF16
    assert next(amp.master_params(optimizer)).dtype is FP32
    losses = train(model, optimizer, steps=8)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("level", "dtype"), [("O1", BF16), ("O4", FP16)])
def test_the_type_of_function_casts_can_be_chosen(level, dtype):
    model, _ = prepared(level, patch_torch_functions_type=dtype)
    assert model(torch.randn(3, 4)).dtype is dtype


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, torch.float64])
def test_model_outputs_have_the_type_asked_for(level, dtype):
    model, _ = prepared(level, cast_model_outputs=dtype)
    assert model(torch.randn(3, 4)).dtype is dtype


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_fp32_modules_stay_fp32_by_type_and_by_name(level):
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    model = amp.initialize(model, opt_level=level, verbosity=0, fp32_modules=[nn.LayerNorm, "2"])
    assert [part.weight.dtype for part in model] == [LOW[level], FP32, FP32]


def test_fp32_modules_need_to_match_in_one_of_several_models_only():
    models = [nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), nn.Sequential(nn.Linear(2, 2))]
    models = amp.initialize(models, opt_level="O5", verbosity=0, fp32_modules=[nn.LayerNorm])
    assert models[0][1].weight.dtype is FP32


# -- the loss scale --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [128, 128.0, "128", "128.0", "1.28e2", np.int64(128), np.float32(128.0)]
)
def test_a_loss_scale_may_be_a_number_or_a_string_of_one(given):
    model, optimizer = prepared("O2", loss_scale=given)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == loss * 128.0
    assert amp._amp_state.opt_properties.loss_scale == 128.0


@pytest.mark.parametrize("given", ["abc", "", "Dynamic", True, [1.0], None.__class__])
def test_what_is_no_loss_scale_is_a_value_error(given):
    model = Net()
    with (
        nothing_changes(model),
        pytest.raises(ValueError, match=r"positive, finite number.*, or a string with one"),
    ):
        amp.initialize(model, opt_level="O2", loss_scale=given)


@pytest.mark.parametrize("given", [0, -1.0, "0", "nan", "inf", float("nan"), float("inf")])
def test_a_loss_scale_that_is_not_positive_and_finite_is_a_value_error(given):
    model = Net()
    with nothing_changes(model), pytest.raises(ValueError, match="positive, finite"):
        amp.initialize(model, opt_level="O2", loss_scale=given)


def test_min_and_max_bound_the_first_scale():
    keep = prepared("O2", max_loss_scale=1024.0)
    assert scale() == 1024.0
    del keep


def test_min_may_raise_the_first_scale():
    keep = prepared("O2", min_loss_scale=2.0**20)
    assert scale() == 2.0**20
    del keep


# -- overrides that are refused --------------------------------------------------------------


CAST_LEVELS = {"O1": "O2", "O4": "O5"}
REFUSED = [
    *((level, {"keep_batchnorm_fp32": value}) for level in CAST_LEVELS for value in (True, False)),
    *((level, {"master_weights": value}) for level in CAST_LEVELS for value in (True, False)),
    *((level, {"cast_model_type": value}) for level in CAST_LEVELS for value in (FP16, BF16)),
]


@pytest.mark.parametrize(("level", "given"), REFUSED)
def test_properties_of_a_converted_model_are_refused_where_functions_cast(level, given):
    model = Net()
    optimizer = sgd(model)
    (name, value), *_ = given.items()
    what = re.escape(f"{name}={value} has no meaning at {level}")
    instead = f"Leave it None, or use opt_level '{CAST_LEVELS[level]}'"
    with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=f"{what}.*{instead}"):
        amp.initialize(model, optimizer, opt_level=level, **given)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_function_casts_are_refused_where_the_model_runs_as_a_whole(level):
    model = Net()
    what = f"patch_torch_functions=True has no meaning at {level}.*Leave it None, or use.*'O1'"
    with nothing_changes(model), pytest.raises(RuntimeError, match=what):
        amp.initialize(model, opt_level=level, patch_torch_functions=True)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_type_for_function_casts_is_refused_where_there_are_none(level):
    what = f"patch_torch_functions_type has no meaning at {level}.*'O1' or 'O4'"
    with pytest.raises(RuntimeError, match=what):
        amp.initialize(Net(), opt_level=level, patch_torch_functions_type=BF16)


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"keep_batchnorm_fp32": "true"}, "a bool, or the string 'True' or 'False'"),
        ({"keep_batchnorm_fp32": torch.float32}, "a bool, or the string 'True' or 'False'"),
        ({"master_weights": 128.0}, "a bool, or the string 'True' or 'False'"),
        ({"keep_fp32_values": "x"}, "a bool, or the string 'True' or 'False'"),
        ({"enabled": "false"}, "a bool, or the string 'True' or 'False'"),
        ({"enabled": ["optimizer"]}, "a bool, or the string 'True' or 'False'"),
        ({"cast_model_type": "half"}, "torch.float16, torch.bfloat16, torch.float32"),
        ({"cast_model_type": torch.int8}, "torch.float16, torch.bfloat16, torch.float32"),
        ({"cast_model_type": True}, "or False for no conversion"),
        ({"cast_model_outputs": torch.int32}, "a floating-point torch.dtype or None"),
        ({"cast_model_outputs": "fp32"}, "a floating-point torch.dtype or None"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error_that_names_the_accepted(given, accepted):
    model = Net()
    (name, value), *_ = given.items()
    what = re.escape(
        f"{name} is {value!r}; it must be {'' if 'or False' in accepted else accepted}"
    )
    with nothing_changes(model), pytest.raises(TypeError, match=what) as e:
        amp.initialize(model, opt_level="O2", **given)
    assert accepted in str(e.value)


def test_a_type_for_function_casts_must_be_16_bits():
    with pytest.raises(TypeError, match=r"torch\.float32; it must be torch\.float16 or torch\.bfl"):
        amp.initialize(Net(), opt_level="O1", patch_torch_functions_type=FP32)


def test_a_hard_override_turns_refusals_into_warnings():
    amp._amp_state.hard_override = True
    with pytest.warns(UserWarning, match="master_weights=True has no meaning at O4"):
        model, _ = prepared("O4", master_weights=True)
    assert model(torch.randn(3, 4)).dtype is BF16
