"""apex's first interface: ``amp.init``, its handle, and ``wrap_optimizer``."""

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex.amp.handle import NoOpHandle
from apex.amp.opt import OptimWrapper
from apex.parallel import LARC
from tests.support import loops
from tests.support.loops import live_sessions, sgd, slope

LINE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"


def one_weight():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    return model, sgd(model.parameters(), lr=0.125)


def backward(loss, optimizer, handle=None):
    with handle.scale_loss(loss, optimizer) if handle else optimizer.scale_loss(loss) as scaled:
        scaled.backward()


def casts(dtype=torch.float16):
    x = torch.ones(2, 2)
    return (x @ x).dtype is dtype


# -- casts -----------------------------------------------------------------------------------


def test_functions_cast_as_at_o1_until_the_handle_is_deactivated():
    handle = amp.init(enable_caching=False, verbose=True)
    assert (handle.has_cache, handle.verbose, handle.cache) == (False, True, {})
    assert amp._amp_state.handle is handle
    assert amp._amp_state.loss_scalers[0]._max_loss_scale == 2.0**24
    assert casts()
    assert torch.exp(torch.ones(2).half()).dtype is torch.float32
    assert handle.is_active() is handle._is_active is True
    handle.remove_cache(torch.ones(1))
    for _ in range(2):
        handle._deactivate()
        assert handle.is_active() is handle._is_active is casts() is False


def test_a_second_init_replaces_the_first_and_a_mistake_does_not():
    amp.init()
    assert (live_sessions(), casts()) == (1, True)  # without the handle being kept
    first, second = amp.init(), amp.init()
    assert (first.is_active(), second.is_active()) == (False, True)
    with pytest.raises(ValueError, match=r"loss_scale is 'abc'.*or a string with one"):
        amp.init(loss_scale="abc")
    with pytest.raises(TypeError, match="enabled is 'no'; it must be a bool"):
        amp.init(enabled="no")
    assert (second.is_active(), live_sessions()) == (True, 1)
    amp.init(enabled="False")
    assert (second.is_active(), casts()) == (False, False)
    del first, second
    assert (live_sessions(), amp.state_dict()) == (0, {})


def test_binary_cross_entropy_on_fp16_is_banned_unless_allowed():
    half = torch.full((2,), 0.5, dtype=torch.float16)
    amp.init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy got a float16 "):
        nn.functional.binary_cross_entropy(half, half)
    other = half.bfloat16()
    assert nn.functional.binary_cross_entropy(other, other).dtype is torch.float32
    amp.init(allow_banned=True)
    assert nn.functional.binary_cross_entropy(half, half).dtype is torch.float32


ORDERS = [
    ((), torch.float16),
    ((True, 8.0, False, True, True), torch.float16),  # NVIDIA's order
    ((True, 8.0, torch.bfloat16, False, True, True), torch.bfloat16),  # the ROCm fork's
]


@pytest.mark.parametrize(("arguments", "dtype"), ORDERS)
def test_a_dtype_as_third_argument_is_the_rocm_forks_patch_type(arguments, dtype):
    handle = amp.init(*arguments)
    assert casts(dtype)
    assert (handle.has_cache, handle.verbose) == ((False, True) if arguments else (True, False))
    half = torch.full((2,), 0.5, dtype=dtype)
    if arguments:
        assert nn.functional.binary_cross_entropy(half, half).dtype is torch.float32
    assert half.cpu().dtype is torch.float32
    handle._deactivate()
    assert half.cpu().dtype is dtype
    with pytest.raises(TypeError, match=r"patch_type is torch.float32; it must be torch.float16"):
        amp.init(True, 8.0, torch.float32)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_init_after_initialize_casts_in_fp16_models_until_it_is_deactivated(level):
    seen = []

    class Ctc(nn.Linear):
        def loss_fn(self, x):
            seen.append((x.dtype, x.softmax(0).dtype))
            return x

        def forward(self, x):
            seen.append(x.softmax(0).dtype)
            return self.loss_fn(super().forward(x))

    model = amp.initialize(Ctc(1, 1), opt_level=level, verbosity=0)
    amp.register_float_function(Ctc, "loss_fn")
    f16, f32 = torch.float16, torch.float32
    handle = amp.init()
    for _ in range(2):
        model(torch.ones(1))
        handle._deactivate()
    assert seen == [f32, (f32, f32), f16, (f16, f16)]


def test_init_after_initialize_leaves_bf16_models_and_the_state_dict_as_they_are():
    seen = []
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    amp.initialize(model, opt_level="O5", loss_scale=8.0, verbosity=0)
    handle = amp.init(loss_scale=4.0)
    model(torch.ones(1))
    assert (seen, loops.scale()) == ([torch.bfloat16], 8.0)
    handle._deactivate()


# -- scale_loss ------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "factor"), [("dynamic", 2.0**16), (128.0, 128.0), ("8", 8.0)])
@pytest.mark.parametrize("wrapper", [None, LARC])
def test_the_handle_scales_and_unscales(given, factor, wrapper):
    handle = amp.init(loss_scale=given)
    model, optimizer = one_weight()
    optimizer = wrapper(optimizer) if wrapper else optimizer
    with handle.scale_loss(slope(model, 2.0), optimizer) as scaled_loss:
        assert scaled_loss == 2.0 * factor
        scaled_loss.backward()
    assert model.weight.grad == 2.0
    optimizer.step()
    assert model.weight < 1.0


def test_an_overflow_skips_the_step_and_halves_the_scale(capsys):
    handle = amp.init()
    model, optimizer = one_weight()
    backward(slope(model, torch.inf), optimizer, handle)
    optimizer.step()
    assert model.weight == 1.0
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    assert capsys.readouterr().out == LINE.format(0, 32768.0)
    with pytest.raises(TypeError, match=r"amp.scale_loss got a loss of type float"):
        handle.scale_loss(1.0, optimizer)


# -- wrap_optimizer --------------------------------------------------------------------------


def test_a_wrapped_optimizer_scales_its_own_loss():
    handle = amp.init(loss_scale=2.0**16)
    model, optimizer = one_weight()
    wrapped = handle.wrap_optimizer(optimizer)
    with wrapped.scale_loss(slope(model, 2.0)) as scaled_loss:
        assert scaled_loss == 2.0 * 2.0**16
        scaled_loss.backward()
    wrapped.step()
    assert model.weight == 0.75
    with pytest.raises(RuntimeError, match=r"Call optimizer\.scale_loss\(loss\) on the wrapped"):
        handle.scale_loss(slope(model, 1.0), wrapped)

    def closure():
        wrapped.zero_grad()
        loss = slope(model, 2.0)
        backward(loss, wrapped)
        return loss

    assert wrapped.step(closure) == 1.5
    assert model.weight == 0.5
    assert wrapped.param_groups is optimizer.param_groups
    wrapped.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    wrapped.load_state_dict(wrapped.state_dict())
    assert repr(wrapped) == repr(optimizer)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = wrapped.no_such_name


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_several_losses_add_up_and_each_has_its_scale(bad, capsys):
    handle = amp.init()
    model, optimizer = one_weight()
    with pytest.raises(ValueError, match="num_loss is 0; it must be an integer of at least 1"):
        handle.wrap_optimizer(optimizer, 0)
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    with pytest.raises(TypeError, match=r"optimizer\.scale_loss got a loss of type"):
        wrapped.scale_loss(1.0)
    for index, value in enumerate((1.0, 3.0)):
        backward(slope(model, torch.inf if index == bad else value), wrapped)
    with pytest.raises(RuntimeError, match=r"more than 2 times.*num_loss=.*wrap_optimizer"):
        wrapped.scale_loss(slope(model, 1.0))
    wrapped.step()
    assert model.weight == (0.5 if bad is None else 1.0)
    line = "" if bad is None else LINE.format(bad, 32768.0)
    assert capsys.readouterr().out == line
    wrapped.zero_grad()
    for index in range(2):
        with wrapped.scale_loss(slope(model, 1.0)) as scaled_loss:
            assert scaled_loss == (2.0**15 if index == bad else 2.0**16) * 1.0 * model.weight
            scaled_loss.backward()


# -- enabled=False ---------------------------------------------------------------------------


def test_disabled_gives_a_handle_that_passes_everything_through():
    handle = amp.init(enabled=False)
    assert type(handle) is NoOpHandle
    assert handle.is_active() is handle._is_active is handle.has_cache is False
    handle._clear_cache()
    handle._deactivate()
    model, optimizer = one_weight()
    loss = slope(model, 2.0)
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    wrapped = OptimWrapper(optimizer, handle, 2)
    for _ in range(3):
        with wrapped.scale_loss(loss) as scaled_loss:
            assert scaled_loss is loss
    loss.backward()
    wrapped.step()
    assert (model.weight, type(optimizer)) == (0.75, torch.optim.SGD)
