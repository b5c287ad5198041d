import inspect

import pytest
import torch
from torch import nn

import apex.amp as amp
from apex.parallel import LARC
from tests.amp.cases import live_sessions, sgd, slope

LINE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"


def one_weight():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    return model, sgd(model)


def backward(loss, optimizer, handle=None):
    with handle.scale_loss(loss, optimizer) if handle else optimizer.scale_loss(loss) as scaled:
        scaled.backward()


def test_the_arguments_have_apex_order_and_defaults():
    parameters = inspect.signature(amp.init).parameters.values()
    assert [(p.name, p.default) for p in parameters] == [
        ("enabled", True),
        ("loss_scale", "dynamic"),
        ("enable_caching", True),
        ("verbose", False),
        ("allow_banned", False),
    ]


# -- casts -----------------------------------------------------------------------------------


def test_functions_cast_as_at_o1_from_init_on():
    handle = amp.init()
    x = torch.ones(2, 2)
    assert (x @ x).dtype is torch.float16
    assert torch.exp(x.half()).dtype is torch.float32
    assert handle.is_active() is handle._is_active is True


def test_deactivate_ends_them():
    handle = amp.init()
    handle._deactivate()
    x = torch.ones(2, 2)
    assert (x @ x).dtype is torch.float32
    assert handle.is_active() is handle._is_active is False
    handle._deactivate()


def test_a_second_init_replaces_the_first():
    first, second = amp.init(), amp.init()
    assert (first.is_active(), second.is_active()) == (False, True)
    second._deactivate()
    assert not torch.is_autocast_enabled("cpu")


def test_the_casts_live_without_the_handle_being_kept():
    amp.init()
    assert live_sessions() == 1
    x = torch.ones(2, 2)
    assert (x @ x).dtype is torch.float16


def test_the_handle_is_that_of_the_amp_state():
    handle = amp.init()
    assert amp._amp_state.handle is handle


def test_binary_cross_entropy_on_half_is_banned_unless_allowed():
    half = torch.full((2,), 0.5, dtype=torch.float16)
    amp.init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
        nn.functional.binary_cross_entropy(half, half)
    amp.init(allow_banned=True)
    assert nn.functional.binary_cross_entropy(half, half).dtype is torch.float32


@pytest.mark.parametrize("caching", [True, False])
def test_caching_is_accepted(caching):
    handle = amp.init(enable_caching=caching)
    handle._clear_cache()
    assert handle.is_active()


def test_verbose_is_kept_on_the_handle():
    assert amp.init(verbose=True).verbose is True
    assert amp.init().verbose is False


# -- scale_loss ------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "factor"), [("dynamic", 2.0**16), (128.0, 128.0), ("8", 8.0)])
def test_the_handle_scales_and_unscales(given, factor):
    handle = amp.init(loss_scale=given)
    model, optimizer = one_weight()
    with handle.scale_loss(slope(model, 2.0), optimizer) as scaled_loss:
        assert scaled_loss == 2.0 * factor
        scaled_loss.backward()
    assert model.weight.grad == 2.0
    optimizer.step()
    assert model.weight == 0.75


def test_an_overflow_skips_the_step_and_halves_the_scale(capsys):
    handle = amp.init()
    model, optimizer = one_weight()
    backward(slope(model, torch.inf), optimizer, handle)
    optimizer.step()
    assert model.weight == 1.0
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    assert capsys.readouterr().out == LINE.format(0, 32768.0)


def test_the_handle_takes_larc():
    handle = amp.init()
    model, optimizer = one_weight()
    larc = LARC(optimizer)
    backward(slope(model, 2.0), larc, handle)
    larc.step()
    assert model.weight < 1.0


@pytest.mark.parametrize("loss", [1.0, torch.ones((), dtype=torch.int64)])
def test_what_is_no_loss_is_a_type_error(loss):
    handle = amp.init()
    _, optimizer = one_weight()
    with pytest.raises(
        TypeError, match=r"amp.scale_loss got a loss of (type float|dtype torch.int)"
    ):
        handle.scale_loss(loss, optimizer)


@pytest.mark.parametrize(
    ("given", "words"), [("abc", "or a string with one"), (0.0, "positive, finite")]
)
def test_what_is_no_loss_scale_is_refused_and_turns_nothing_on(given, words):
    with pytest.raises(ValueError, match=words):
        amp.init(loss_scale=given)
    assert not torch.is_autocast_enabled("cpu")
    assert live_sessions() == 0


def test_a_mistake_leaves_an_earlier_handle_active():
    handle = amp.init()
    with pytest.raises(ValueError, match="loss_scale is 'abc'"):
        amp.init(loss_scale="abc")
    assert handle.is_active()
    assert live_sessions() == 1


def test_the_string_false_disables():
    assert not amp.init(enabled="False").is_active()
    with pytest.raises(TypeError, match="enabled is 'no'; it must be a bool"):
        amp.init(enabled="no")


def test_init_after_initialize_leaves_its_scale_to_scripts_and_checkpoints():
    model, optimizer = amp.initialize(*one_weight(), opt_level="O1", verbosity=0)
    amp.init()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7}})
    with amp.scale_loss(slope(model, 2.0), optimizer) as scaled_loss:
        assert scaled_loss == 2.0 * 128.0
        scaled_loss.backward()
    assert amp._amp_state.loss_scalers[0]._unskipped == 8
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 8}}
    amp.init(enabled=False)
    assert amp._amp_state.opt_properties.options["opt_level"] == "O1"
    assert amp._amp_state.opt_properties.enabled is True


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


# -- wrap_optimizer --------------------------------------------------------------------------


def test_a_wrapped_optimizer_scales_its_own_loss():
    handle = amp.init()
    model, optimizer = one_weight()
    wrapped = handle.wrap_optimizer(optimizer)
    with wrapped.scale_loss(slope(model, 2.0)) as scaled_loss:
        assert scaled_loss == 2.0 * 2.0**16
        scaled_loss.backward()
    wrapped.step()
    assert model.weight == 0.75


def test_the_handle_refuses_to_scale_for_a_wrapped_optimizer():
    handle = amp.init()
    model, optimizer = one_weight()
    wrapped = handle.wrap_optimizer(optimizer)
    with pytest.raises(RuntimeError, match=r"Call optimizer\.scale_loss\(loss\) on the wrapped"):
        handle.scale_loss(slope(model, 1.0), wrapped)


def test_several_losses_add_up_and_each_has_its_scale():
    handle = amp.init()
    model, optimizer = one_weight()
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    for value in (1.0, 3.0):
        backward(slope(model, value), wrapped)
    assert model.weight.grad == 4.0
    wrapped.step()
    assert model.weight == 0.5
    assert len(wrapped._loss_scaler) == 2


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_any_loss_skips_the_step_and_lowers_its_own_scale(bad, capsys):
    handle = amp.init()
    model, optimizer = one_weight()
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    for index in range(2):
        backward(slope(model, torch.inf if index == bad else 1.0), wrapped)
    wrapped.step()
    assert model.weight == 1.0
    assert capsys.readouterr().out == LINE.format(bad, 32768.0)
    wrapped.zero_grad()
    for index in range(2):
        with wrapped.scale_loss(slope(model, 1.0)) as scaled_loss:
            assert scaled_loss == (2.0**15 if index == bad else 2.0**16)
            scaled_loss.backward()
    wrapped.step()
    assert model.weight == 0.75


def test_more_losses_than_said_are_refused_with_the_remedy():
    handle = amp.init()
    model, optimizer = one_weight()
    wrapped = handle.wrap_optimizer(optimizer)
    backward(slope(model, 1.0), wrapped)
    with pytest.raises(RuntimeError, match=r"more than 1 times.*num_loss=.*wrap_optimizer"):
        wrapped.scale_loss(slope(model, 1.0))
    wrapped.step()
    backward(slope(model, 1.0), wrapped)


@pytest.mark.parametrize("num_loss", [0, "2", 1.5, None])
def test_what_is_no_number_of_losses_is_refused(num_loss):
    model = nn.Linear(1, 1)
    handle, optimizer = amp.init(), sgd(model)
    with pytest.raises(ValueError, match=f"num_loss is {num_loss!r}; it must be an integer of at"):
        handle.wrap_optimizer(optimizer, num_loss)
    assert type(optimizer) is torch.optim.SGD


@pytest.mark.parametrize("loss", [None, "loss", 1.0])
def test_what_is_no_loss_does_not_count_as_one(loss):
    model = nn.Linear(1, 1)
    wrapped = amp.init().wrap_optimizer(sgd(model))
    with pytest.raises(TypeError, match=r"optimizer\.scale_loss got a loss of type"):
        wrapped.scale_loss(loss)
    with wrapped.scale_loss(slope(model, 1.0)) as scaled_loss:
        scaled_loss.backward()


def test_everything_else_is_the_optimizer_s_own():
    handle = amp.init()
    _, optimizer = one_weight()
    wrapped = handle.wrap_optimizer(optimizer)
    assert wrapped.param_groups is optimizer.param_groups
    assert wrapped.state_dict() == optimizer.state_dict()
    assert repr(wrapped) == repr(optimizer)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = wrapped.no_such_name


def test_a_wrapped_optimizer_takes_a_closure():
    handle = amp.init()
    model, optimizer = one_weight()
    wrapped = handle.wrap_optimizer(optimizer)

    def closure():
        wrapped.zero_grad()
        loss = slope(model, 2.0)
        backward(loss, wrapped)
        return loss

    assert wrapped.step(closure) == 2.0
    assert model.weight == 0.75


# -- enabled=False ---------------------------------------------------------------------------


def test_disabled_gives_a_handle_that_passes_everything_through():
    handle = amp.init(enabled=False)
    assert type(handle).__name__ == "NoOpHandle"
    assert handle.is_active() is handle._is_active is False
    handle._clear_cache()
    handle._deactivate()
    model, optimizer = one_weight()
    loss = slope(model, 2.0)
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    for _ in range(3):
        with wrapped.scale_loss(loss) as scaled_loss:
            assert scaled_loss is loss
    loss.backward()
    wrapped.step()
    assert model.weight == 0.75
    assert type(optimizer) is torch.optim.SGD


def test_disabled_ends_an_earlier_handle():
    first = amp.init()
    amp.init(enabled=False)
    assert not first.is_active()
    del first
    assert live_sessions() == 0
    assert amp.state_dict() == {}


def test_the_handle_classes_are_importable_where_apex_has_them():
    from apex.amp.handle import AmpHandle, NoOpHandle
    from apex.amp.opt import OptimWrapper

    assert isinstance(amp.init(), AmpHandle)
    handle = amp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    assert isinstance(handle.wrap_optimizer(one_weight()[1]), OptimWrapper)
