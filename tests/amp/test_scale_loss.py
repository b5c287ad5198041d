import inspect

import pytest
import torch
from torch import nn

import apex.amp as amp
from tests.amp.cases import (
    DYNAMIC,
    LEVELS,
    Net,
    backward,
    loss_of,
    nothing_changes,
    one_weight,
    overflow,
    prepared,
    scale,
    sgd,
    slope,
    unskipped,
)

every_level = pytest.mark.parametrize("level", LEVELS)


def grads(optimizer):
    return [p.grad for p in amp.master_params(optimizer)]


@every_level
def test_an_optimizer_that_is_given_twice_counts_once(level):
    model, optimizer = prepared(level)
    with amp.scale_loss(loss_of(model), [optimizer]) as scaled_loss:
        scaled_loss.backward()
    once = grads(optimizer)
    model.zero_grad()
    with amp.scale_loss(loss_of(model), [optimizer, optimizer]) as scaled_loss:
        scaled_loss.backward()
    assert all(map(torch.equal, grads(optimizer), once))


def test_the_arguments_have_apex_order_and_defaults():
    parameters = inspect.signature(amp.scale_loss).parameters.values()
    assert [(p.name, p.default) for p in parameters] == [
        ("loss", inspect.Parameter.empty),
        ("optimizers", inspect.Parameter.empty),
        ("loss_id", 0),
        ("model", None),
        ("delay_unscale", False),
        ("delay_overflow_check", False),
    ]


def test_the_model_argument_is_accepted():
    model, optimizer = prepared("O2")
    backward(loss_of(model), optimizer, model=model)
    assert unskipped() == 1


# -- refusals --------------------------------------------------------------------------------


def test_before_initialize_the_error_shows_the_call():
    model = Net()
    optimizer = sgd(model)
    words = r"before amp\.initialize.*\n.*model, optimizer = amp\.initialize\(model, optimizer, opt"
    with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
        amp.scale_loss(torch.ones(()), optimizer)
    with pytest.raises(RuntimeError, match=words):
        amp.scale_loss(torch.ones(()), [])


def test_an_optimizer_that_amp_has_not_prepared_is_refused():
    model, optimizer = prepared("O2")
    loss = loss_of(model)
    words = "no optimizer that amp has prepared. Pass it to amp.initialize"
    with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
        amp.scale_loss(loss, sgd(Net()))
    with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
        amp.scale_loss(loss, [optimizer, sgd(Net())])


def test_an_optimizer_s_own_session_scales_whichever_came_last():
    first, second = prepared("O2", loss_scale=8.0), prepared("O2", loss_scale=4.0)
    for (model, optimizer), factor in ((first, 8.0), (second, 4.0)):
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert scaled_loss == factor * loss


def test_the_newest_session_of_the_optimizers_scales():
    optimizers = [prepared("O2", loss_scale=scale)[1] for scale in (8.0, 4.0, 2.0)]
    for which, factor in (((0, 1), 4.0), ((1, 0), 4.0), ((0, 2, 1), 2.0)):
        loss = torch.ones((), requires_grad=True)
        with amp.scale_loss(loss, [optimizers[i] for i in which]) as scaled_loss:
            assert scaled_loss == factor


@pytest.mark.parametrize(
    "loss", [1.0, None, [torch.ones(())], "loss", torch.nn.MSELoss()], ids=type
)
def test_a_loss_that_is_no_tensor_is_a_type_error(loss):
    model, optimizer = prepared("O2")
    words = f"loss of type {type(loss).__name__}; it must be a tensor"
    with nothing_changes(model, optimizer), pytest.raises(TypeError, match=words):
        amp.scale_loss(loss, optimizer)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_loss_that_is_not_floating_is_a_type_error(dtype):
    model, optimizer = prepared("O2")
    words = f"loss of dtype {dtype}; it must have a real floating-point dtype"
    with nothing_changes(model, optimizer), pytest.raises(TypeError, match=words):
        amp.scale_loss(torch.ones((), dtype=dtype), optimizer)


def test_a_loss_id_that_is_no_integer_is_a_type_error():
    _, optimizer = prepared("O5")
    with pytest.raises(TypeError, match="loss_id is 'gan'; it must be an integer"):
        amp.scale_loss(torch.ones(()), optimizer, loss_id="gan")


def test_the_masters_of_a_model_are_asked_of_its_optimizer():
    with pytest.raises(TypeError, match=r"got the model Linear; it takes an optimizer"):
        next(amp.master_params(torch.nn.Linear(1, 1)))


@pytest.mark.parametrize("given", [None, [], "optimizer"])
def test_masters_of_what_is_no_optimizer_are_refused(given):
    with pytest.raises(TypeError, match=f"got {type(given).__name__}; it takes an optimizer"):
        next(amp.master_params(given))


@pytest.mark.parametrize("loss_id", [2, 7, -3])
def test_a_loss_id_out_of_range_is_an_index_error(loss_id):
    model, optimizer = prepared("O2", num_losses=2)
    loss = loss_of(model)
    words = rf"loss_id is {loss_id}, but this amp\.initialize made 2 loss scalers"
    with nothing_changes(model, optimizer), pytest.raises(IndexError, match=words):
        amp.scale_loss(loss, optimizer, loss_id=loss_id)


@pytest.mark.parametrize("loss_id", [2, -3])
def test_the_index_error_tells_how_many_losses_to_ask_for(loss_id):
    model, optimizer = prepared("O2")
    with pytest.raises(IndexError, match=r"1 loss scaler\..* num_losses=3 to amp\.initialize"):
        amp.scale_loss(loss_of(model), optimizer, loss_id=loss_id)


def test_a_block_without_with_tells_how_to_write_it():
    model, optimizer = prepared("O2")
    loss = loss_of(model)
    words = r"returns a context(?s:.*)with amp\.scale_loss\(loss, optimizer\) as scaled_loss"
    with nothing_changes(model, optimizer), pytest.raises(RuntimeError, match=words):
        amp.scale_loss(loss, optimizer).backward()


def test_what_is_no_optimizer_is_a_type_error():
    model, _ = prepared("O2")
    with pytest.raises(TypeError, match="got Net instead of an optimizer"):
        amp.scale_loss(loss_of(model), model)


# -- the loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_of_any_floating_dtype_0d_or_1_is_scaled(dtype, shape):
    model, optimizer = one_weight("O2", loss_scale=8.0)
    loss = (slope(model, 3.0)).to(dtype).reshape(shape)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.shape == shape
        assert scaled_loss == 24.0
        scaled_loss.backward()
    assert [grad.item() for grad in grads(optimizer)] == [3.0]


def test_16_bit_losses_are_scaled_in_fp32_where_they_do_not_overflow():
    model, optimizer = prepared("O2")
    for dtype in (torch.float16, torch.bfloat16):
        with amp.scale_loss(loss_of(model).to(dtype) + 4.0, optimizer) as scaled_loss:
            assert torch.isfinite(scaled_loss)
            assert scaled_loss.dtype is torch.float32
            scaled_loss.sum().mul(0).backward()


def test_an_fp16_loss_overflows_at_the_first_scale_and_then_trains():
    model, optimizer = one_weight("O1")
    for expected in (2.0**15, 2.0**15):
        backward(model.weight.sum().half(), optimizer)
        assert scale() == expected
    optimizer.zero_grad()
    backward(model.weight.sum().half(), optimizer)
    optimizer.step()
    assert model.weight == 0.875


@every_level
def test_scale_1_gives_the_loss_itself_unscaled(level):
    model, optimizer = prepared(level, loss_scale=1.0)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == loss


# -- the optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_list_only_scales(empty):
    model, _ = one_weight("O1")
    with amp.scale_loss(model.weight.sum(), empty) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad == 2.0**16


def test_several_optimizers_are_unscaled_together():
    model = Net()
    optimizers = [
        torch.optim.SGD(model.first.parameters(), lr=0.1),
        torch.optim.Adam(model.last.parameters(), lr=0.1),
    ]
    model, optimizers = amp.initialize(model, optimizers, opt_level="O1", verbosity=0)
    loss_of(model).backward()
    expected = [grad.clone() for optimizer in optimizers for grad in grads(optimizer)]
    model.zero_grad()
    backward(loss_of(model), tuple(optimizers))
    found = [grad for optimizer in optimizers for grad in grads(optimizer)]
    torch.testing.assert_close(found, expected, rtol=2**-9, atol=1e-6)


def test_an_overflow_skips_the_step_of_every_optimizer_given_with_the_loss():
    model = Net()
    optimizers = [sgd(model.first), sgd(model.last)]
    model, optimizers = amp.initialize(model, optimizers, opt_level="O1", verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    backward(loss_of(model) + model.last.weight.sum() * torch.inf, optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


# -- several losses --------------------------------------------------------------------------


def test_each_loss_id_has_its_own_scale():
    model, optimizer = prepared("O2", num_losses=3)
    overflow(model, optimizer, loss_id=1)
    assert [scale(index) for index in range(3)] == [2.0**16, 2.0**15, 2.0**16]


def test_losses_add_up_to_the_gradient_of_their_sum():
    model, optimizer = one_weight("O2", num_losses=2)
    backward(slope(model, 0.5), optimizer, loss_id=0)
    backward(slope(model, 0.25), optimizer, loss_id=1)
    assert [grad.item() for grad in grads(optimizer)] == [0.75]


@pytest.mark.parametrize("level", DYNAMIC)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_overflow_in_any_loss_skips_the_step(level, order):
    model, optimizer = prepared(level, num_losses=2)
    before = [p.detach().clone() for p in model.parameters()]
    for loss_id in order:
        factor = torch.inf if loss_id == 1 else 0.5
        backward(slope(model.last, factor), optimizer, loss_id=loss_id)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert (scale(0), scale(1)) == (2.0**16, 2.0**15)


# -- enabled, set by a script ----------------------------------------------------------------


def test_enabled_set_to_false_makes_scale_loss_pass_the_loss_through():
    model, optimizer = prepared("O2")
    amp._amp_state.opt_properties.enabled = False
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    amp._amp_state.opt_properties.enabled = True
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss == 2.0**16 * loss


def test_one_optimizer_over_two_models_unscales_both():
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.125)
    models, optimizer = amp.initialize(models, optimizer, opt_level="O2", verbosity=0)
    backward(slope(models[0], 0.5) + slope(models[1], 0.25), optimizer)
    assert [grad.item() for grad in grads(optimizer)] == [0.5, 0.25]


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_loss_whose_own_backward_scales_it_takes_part_once(level):
    model = nn.Linear(2, 1)
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    loss = model(torch.ones(1, 2)).float().sum()

    def backward():
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    loss.backward = backward
    loss.backward()
    weight, bias = amp.master_params(optimizer)
    assert (weight.grad.tolist(), bias.grad.tolist()) == ([[1.0, 1.0]], [1.0])
