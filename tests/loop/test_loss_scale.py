"""How the loss scale moves, and what it says when it moves down for good."""

import warnings

import pytest
import torch

from apex import amp
from apex._torch.dispatcher import release
from tests.support import loops


def one_param(level="O1", **options):
    """A model with one weight: thousands of steps take a second."""
    return loops.prepared(level, model=torch.nn.Linear(1, 1, bias=False), **options)


def step(model, optimizer, gradient):
    """One training step whose weight gets ``gradient``."""
    optimizer.zero_grad()
    loss = model.weight.float().sum() * gradient
    loops.scaled_backward(loss, optimizer)
    optimizer.step()


def scales_after(gradients, **options):
    model, optimizer = one_param(**options)
    history = []
    for gradient in gradients:
        step(model, optimizer, gradient)
        history.append(loops.loss_scale())
    return history


OK, INF = 1e-3, float("inf")


@pytest.mark.parametrize(
    ("options", "gradients", "exponents"),
    [
        ({"growth_interval": 3}, [OK] * 7, [16, 16, 17, 17, 17, 18, 18]),
        ({"growth_interval": 3}, [OK, OK, INF, OK, OK, OK], [16, 16, 15, 15, 15, 16]),
        (
            {"growth_interval": 1, "growth_factor": 4.0, "backoff_factor": 0.125},
            [OK, INF],
            [18, 15],
        ),
        ({"growth_interval": 1, "max_loss_scale": 2.0**17}, [OK] * 3, [17] * 3),
        ({"growth_interval": 1, "level": "O4"}, [OK] * 10, [*range(17, 25), 24, 24]),
        ({"min_loss_scale": 2.0**15}, [INF] * 3, [15] * 3),
        ({"loss_scale": "128.0"}, [OK, INF], [7, 7]),
        ({"loss_scale": 64}, [OK, INF], [6, 6]),
    ],
    ids=["grows", "counts anew", "factors", "most", "2 to 24", "least", "string", "number"],
)
def test_the_scale_follows_the_gradients(options, gradients, exponents):
    options = {"loss_scale": "dynamic", **options}
    assert scales_after(gradients, **options) == [2.0**exponent for exponent in exponents]


def test_the_scale_doubles_after_exactly_2000_clean_steps():
    model, optimizer = one_param()
    scaler = amp._amp_state.loss_scalers[0]
    scaler._unskipped = 1997
    found = []
    for _ in range(4):
        step(model, optimizer, OK)
        found.append((loops.loss_scale(), scaler._unskipped))
    assert found == [(2.0**16, 1998), (2.0**16, 1999), (2.0**17, 0), (2.0**17, 1)]


def test_a_start_outside_the_bounds_is_moved_inside():
    one, two = one_param(max_loss_scale=2.0**10), one_param(min_loss_scale=2.0**20)
    assert [scaler["loss_scale"] for scaler in amp.state_dict().values()][-2:] == [2.0**10, 2.0**20]
    del one, two


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


@pytest.mark.parametrize(("level", "name"), [("O1", "fused AdamW"), ("O5", "SGD")])
def test_permanent_nan_warns_once_and_never_reaches_scale_zero(level, name):
    """It goes on from there."""
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = loops.prepared(
        level, loops.OPTIMIZERS[name], model, loss_scale="dynamic", growth_interval=1
    )
    before = loops.values(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            step(model, optimizer, float("nan"))
    assert len(caught) == 1
    assert "skipped 50 steps in a row" in str(caught[0].message)
    assert loops.loss_scale() == torch.finfo(torch.float32).tiny
    assert loops.same(before, loops.values(model.parameters()))
    step(model, optimizer, 1e30)
    assert loops.loss_scale() == 2 * torch.finfo(torch.float32).tiny
    assert not loops.same(before, loops.values(model.parameters()))


@pytest.mark.parametrize(("gradient", "found"), [(float("nan"), "2 nan of 2"), (INF, "2 inf of 2")])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_warning_names_the_parameter_and_tells_nan_from_inf(level, gradient, found):
    model, optimizer = loops.prepared(level)

    def train():
        for _ in range(50):
            optimizer.zero_grad()
            loss = (model[2].bias.float() * gradient).sum() + (model[0].bias * 1e-3).float().sum()
            loops.scaled_backward(loss, optimizer)
            optimizer.step()

    with pytest.warns(UserWarning, match=rf"Nonfinite gradients: 2\.bias \({found}\)") as caught:
        train()
    assert len(caught) == 1
    # Before torch 2.8 frames of ours are in between.
    assert release < (2, 8) or caught[0].filename == __file__


def test_49_skips_in_a_row_do_not_warn():
    model, optimizer = one_param()
    for _ in range(2):
        for _ in range(49):
            step(model, optimizer, INF)
        step(model, optimizer, OK)
    assert loops.loss_scale() < 1.0
