"""How the loss scale moves, and what it says when it moves down for good."""

import warnings

import pytest
import torch

from apex import amp
from apex._torch.dispatcher import release
from tests.support import training as cases


def one_param(level="O1", **options):
    """A model with one weight: thousands of steps take a second."""
    return cases.prepared(level, model=torch.nn.Linear(1, 1, bias=False), **options)


def step(model, optimizer, gradient):
    """One training step whose weight gets ``gradient``."""
    optimizer.zero_grad()
    loss = model.weight.float().sum() * gradient
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def run(times, train):
    for _ in range(times):
        train()


def scales_after(gradients, **options):
    model, optimizer = one_param(**options)
    history = []
    for gradient in gradients:
        step(model, optimizer, gradient)
        history.append(cases.loss_scale())
    return history


OK, INF = 1e-3, float("inf")


def test_the_scale_doubles_after_exactly_growth_interval_clean_steps():
    assert scales_after([OK] * 7, growth_interval=3) == [
        *[2.0**16] * 2, *[2.0**17] * 3, *[2.0**18] * 2
    ]  # fmt: skip


def test_the_scale_doubles_after_exactly_2000_clean_steps():
    history = scales_after([OK] * 2001)
    assert history == [2.0**16] * 1999 + [2.0**17] * 2


def test_an_overflow_restarts_the_count_of_clean_steps():
    assert scales_after([OK, OK, INF, OK, OK, OK], growth_interval=3) == [
        2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**16
    ]  # fmt: skip


def test_growth_and_backoff_factors_are_the_callers():
    history = scales_after([OK, INF], growth_interval=1, growth_factor=4.0, backoff_factor=0.125)
    assert history == [2.0**18, 2.0**15]


def test_the_scale_stops_at_max_loss_scale():
    assert scales_after([OK] * 3, growth_interval=1, max_loss_scale=2.0**17) == [2.0**17] * 3


def test_the_scale_stops_at_2_to_24_by_default():
    assert (
        scales_after([OK] * 10, growth_interval=1, level="O4", loss_scale="dynamic")[-3:]
        == [2.0**24] * 3
    )


def test_the_scale_stops_at_min_loss_scale():
    assert scales_after([INF] * 3, min_loss_scale=2.0**15) == [2.0**15] * 3


def test_a_start_outside_the_bounds_is_moved_inside():
    one, two = one_param(max_loss_scale=2.0**10), one_param(min_loss_scale=2.0**20)
    assert [scaler["loss_scale"] for scaler in amp.state_dict().values()][-2:] == [2.0**10, 2.0**20]
    del one, two


@pytest.mark.parametrize(("given", "scale"), [("128.0", 128.0), ("1e3", 1000.0), (64, 64.0)])
def test_a_static_scale_may_be_a_number_or_a_string_of_one(given, scale):
    assert scales_after([OK, INF], loss_scale=given) == [scale, scale]


def test_a_static_scale_divides_by_what_it_multiplied_with():
    model, optimizer = one_param("O0", loss_scale="48.0")
    with amp.scale_loss(model.weight.sum(), optimizer) as scaled_loss:
        assert scaled_loss == model.weight.sum() * 48
        scaled_loss.backward()
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 1), rtol=2**-23, atol=0.0)


@pytest.mark.parametrize("loss_scale", ["dynamic", 1.0, 8.0])
def test_unskipped_counts_clean_steps(loss_scale):
    model, optimizer = one_param(loss_scale=loss_scale)
    for _ in range(3):
        step(model, optimizer, OK)
    assert amp._amp_state.loss_scalers[0]._unskipped == 3


@pytest.mark.parametrize(("level", "name"), [("O1", "fused AdamW"), ("O2", "SGD")])
def test_permanent_nan_warns_once_and_never_reaches_scale_zero(level, name):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = cases.OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = cases.values(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5000):
            step(model, optimizer, float("nan"))
    assert len(caught) == 1
    assert "skipped 50 steps in a row" in str(caught[0].message)
    assert cases.loss_scale() == torch.finfo(torch.float32).tiny
    assert cases.same(before, cases.values(model.parameters()))


def test_training_recovers_from_the_floor():
    model, optimizer = one_param("O4", loss_scale="dynamic", growth_interval=1)
    with pytest.warns(UserWarning, match="skipped 50"):
        run(200, lambda: step(model, optimizer, INF))
    before = cases.values(model.parameters())
    step(model, optimizer, OK)
    assert cases.loss_scale() == 2 * torch.finfo(torch.float32).tiny
    assert not cases.same(before, cases.values(model.parameters()))


@pytest.mark.parametrize(("gradient", "found"), [(float("nan"), "2 nan of 2"), (INF, "2 inf of 2")])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_warning_names_the_parameter_and_tells_nan_from_inf(level, gradient, found):
    model, optimizer = cases.prepared(level)

    def train():
        optimizer.zero_grad()
        loss = (model[2].bias.float() * gradient).sum() + (model[0].bias * 1e-3).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    with pytest.warns(UserWarning, match=rf"Nonfinite gradients: 2\.bias \({found}\)") as caught:
        run(50, train)
    assert len(caught) == 1
    # Before torch 2.8 frames of ours are in between.
    assert release < (2, 8) or caught[0].filename == __file__


def test_49_skips_in_a_row_do_not_warn():
    model, optimizer = one_param()
    for _ in range(2):
        for _ in range(49):
            step(model, optimizer, INF)
        step(model, optimizer, OK)
    assert cases.loss_scale() < 1.0


def test_an_overflow_is_printed_once_for_each_optimizer(capsys):
    model, optimizer = one_param()
    amp._amp_state.verbosity = 1
    step(model, optimizer, INF)
    line = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    assert capsys.readouterr().out == line


def test_verbosity_0_prints_nothing(capsys):
    step(*one_param(), INF)
    assert capsys.readouterr().out == ""


def check_16_bit_gradients(model, dtype):
    """Clean and overflowing passes at O3 with a dynamic scale: right weights, right scale."""
    model, optimizer = cases.prepared(
        "O3", cases.sgd, model=model, cast_model_type=dtype, loss_scale="dynamic"
    )
    model.weight.data.fill_(1.0)
    for gradient, after, scale in ((0.25, 0.975, 16), (INF, 0.975, 15), (-0.25, 1.0, 15)):
        step(model, optimizer, gradient)
        assert float(model.weight.detach()) == pytest.approx(after, rel=2**-8)
        assert cases.loss_scale() == 2.0**scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_dynamic_scale_without_masters_trains_16_bit_weights(dtype):
    check_16_bit_gradients(torch.nn.Linear(1, 1, bias=False), dtype)
