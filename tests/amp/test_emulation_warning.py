import sys
import warnings

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex._torch.devices import cpu_features, plain_cpu_features
from tests.amp.cases import LEVELS, Net

WORDS = r"fp16 is emulated on this CPU.*Use bf16 here.*'O4' instead of 'O1', or 'O5'"


def native_fp16():
    has = cpu_features()
    return has.get("avx512_fp16") or has.get("amx_fp16") or has["architecture"] == "aarch64"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only torch knows")
def test_before_torch_2_9_the_system_says_what_the_cpu_computes():
    has, known = cpu_features(), plain_cpu_features()
    for name in ("avx512_fp16", "amx_fp16", "avx512_bf16", "amx_bf16"):
        assert bool(has.get(name)) == bool(known.get(name))
    assert known["architecture"] == has.get("architecture", known["architecture"])


emulated = pytest.mark.skipif(bool(native_fp16()), reason="this CPU computes in fp16")
native = pytest.mark.skipif(not native_fp16(), reason="this CPU emulates fp16")


@emulated
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_fp16_level_warns_once_at_the_caller_s_line(level):
    with pytest.warns(UserWarning, match=WORDS) as caught:
        keep = amp.initialize([Net(), Net()], opt_level=level, verbosity=0)
    assert [warning.filename for warning in caught] == [__file__]
    del keep


@emulated
def test_init_warns_too_at_the_caller_s_line():
    with pytest.warns(UserWarning, match=WORDS) as caught:
        amp.init()
    assert [warning.filename for warning in caught] == [__file__]


@emulated
def test_a_bf16_level_overridden_to_fp16_warns():
    with pytest.warns(UserWarning, match=WORDS):
        keep = amp.initialize(Net(), opt_level="O5", cast_model_type=torch.float16, verbosity=0)
    del keep


def silent(level, model, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize(model, opt_level=level, verbosity=0, **kwargs)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_levels_without_fp16_do_not_warn(level):
    silent(level, Net())


def test_an_fp16_level_overridden_to_bf16_does_not_warn():
    silent("O2", Net(), cast_model_type=torch.bfloat16)


def test_no_casts_at_o1_do_not_warn():
    silent("O1", Net(), patch_torch_functions=False)


def test_disabled_does_not_warn():
    silent("O1", Net(), enabled=False)


@native
@pytest.mark.parametrize("level", LEVELS)
def test_a_cpu_that_computes_in_fp16_is_not_warned_of(level):
    silent(level, Net())


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_on_the_gpu_is_not_warned_of(level):
    silent(level, nn.Linear(2, 2).cuda())


@emulated
def test_as_an_error_the_warning_leaves_everything_as_it_was():
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=WORDS):
            amp.initialize(model, opt_level="O2")
    assert type(model) is Net
    assert model.first.weight.dtype is torch.float32
    assert amp.state_dict() == {}
