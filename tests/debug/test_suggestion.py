"""``suggest_fp32`` names the planted module and nothing else, and leaves everything as it was."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.debug import rounding_cases
from tests.debug.bodies import Body, everything
from tests.debug.rounding_cases import layer, shift
from tests.support.loops import live_sessions, same

PLANTED = ("shift", "rotary", "sum", "average", "backward")


def suggested(model, length=24):
    inputs, targets = rounding_cases.sample(model, length)
    return amp.debug.suggest_fp32(
        model, inputs, loss_fn=lambda out: rounding_cases.cross_entropy(out, targets)
    )


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_module_is_found_and_nothing_else(fault):
    faulty, length, _, _ = rounding_cases.FAULTS[fault]
    found = suggested(rounding_cases.around(faulty), length)
    assert found.modules == ["faulty"]
    assert found.error_after < found.error_before
    assert found.notes == ()
    assert "faulty" in str(found)


@pytest.mark.parametrize("name", rounding_cases.HEALTHY)
def test_a_healthy_model_needs_none(name):
    torch.manual_seed(1)
    found = suggested(rounding_cases.HEALTHY[name]())
    assert found.modules == []
    assert found.error_before == found.error_after > 0.0
    assert str(found).startswith("No module needs fp32 at O5: error of the gradients")
    assert found.setting == ""


def test_the_error_is_the_root_mean_square_over_the_parameters():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 8)

    def square(output):
        return output.float().square().mean()

    exact = torch.autograd.grad(square(model(x)), [*model.parameters()])
    found = amp.debug.suggest_fp32(model, x, loss_fn=square)
    amp.initialize(model, opt_level="O5", verbosity=0)
    rounded = torch.autograd.grad(square(model(x)), [*model.parameters()])
    pairs = zip(rounded, exact, strict=True)
    errors = torch.stack([(ours - theirs).norm() / theirs.norm() for ours, theirs in pairs])
    assert found.error_before == pytest.approx(errors.square().mean().sqrt().item(), rel=1e-4)


def test_several_faults_are_all_found():
    kinds = shift, torch.tanh, shift, rounding_cases.Cancels.apply
    blocks = [nn.Sequential(nn.Linear(32, 32), layer(kind), nn.LayerNorm(32)) for kind in kinds]
    model = nn.Sequential(nn.Embedding(65, 32), *blocks, nn.Linear(32, 65))
    assert sorted(suggested(model).modules) == ["1.1", "3.1", "4.1"]


def test_a_module_whose_name_begins_with_another_s_is_not_inside_it():
    def block():
        return nn.Linear(32, 32), layer(shift), nn.LayerNorm(32)

    model = nn.Sequential(*block(), *(nn.Identity() for _ in range(6)), *block(), nn.Linear(32, 10))
    assert sorted(suggested(model).modules) == ["1", "10"]


def test_frozen_weights_vanishing_gradients_and_autocast_around_it_change_no_verdict():
    torch.manual_seed(0)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    # Before a batch norm, the gradient of a bias is 0 but for rounding.
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), frozen, layer(shift), nn.Linear(8, 1)
    model = nn.Sequential(*layers)
    model[0].unused = nn.Parameter(torch.ones(8))
    with torch.autocast("cpu", torch.bfloat16):
        found = amp.debug.suggest_fp32(model, torch.randn(64, 8))
    assert found.modules == ["3"]
    assert found.error_after < 0.05


def test_a_model_may_keep_its_activations():
    """As models with ``weight_norm`` do; torch makes no deep copy of them."""

    def forward(self, x):
        self.features = [self.linear(x)]
        return self.features[0].square()

    model, x = Body(forward, linear=nn.Linear(8, 8)), torch.randn(16, 8)
    model(x)
    (features,) = model.features
    assert amp.debug.suggest_fp32(model, x).modules == []
    assert model.features == [features]


def test_an_error_that_no_module_repairs_is_no_all_clear():
    torch.manual_seed(0)
    positions = nn.Buffer(torch.arange(512.0))

    def forward(self, x):
        return self.embed(self.positions.long()) * x

    model = Body(forward, embed=nn.Embedding(520, 4), positions=positions)
    found = amp.debug.suggest_fp32(model, torch.randn(512, 4))
    assert found.modules == []
    assert "No module in fp32 repairs the error" in found.verdict
    assert "fp32_buffers" in found.verdict


def test_a_fault_outside_of_modules_is_noted():
    torch.manual_seed(0)
    model = Body(lambda self, x: shift(self.linear(x)), linear=nn.Linear(8, 8))
    found = amp.debug.suggest_fp32(model, torch.randn(16, 8))
    assert found.modules == []
    assert found.notes[0].startswith("aten.sub in the model loses digits")


def test_an_error_that_enters_before_the_module_that_magnifies_it_is_noted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), layer(lambda x: x - 1000), nn.Linear(8, 1))
    nn.init.constant_(model[0].bias, 1000.0)
    (note,) = amp.debug.suggest_fp32(model, torch.randn(16, 8)).notes
    assert note.startswith("aten.sub in 1 loses digits")


def test_an_operator_without_a_verdict_is_noted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), layer(lambda x: (x + 1e6) - 1e6), nn.Linear(8, 1))
    (note,) = amp.debug.suggest_fp32(model, torch.randn(16, 8)).notes
    assert note.startswith("aten.sub has no verdict: ")


def test_a_fault_that_reaches_no_gradient_needs_no_fp32():
    beside = layer(lambda x: x + 0 * shift(x))
    model = nn.Sequential(nn.Linear(8, 8), beside, nn.Linear(8, 1))
    assert amp.debug.suggest_fp32(model, torch.randn(16, 8)).modules == []


def test_gradients_that_overflow_whatever_is_in_fp32_give_no_verdict():
    linear = nn.Linear(8, 8)
    model = Body(lambda self, x: (1 - (self.linear(x) + 8).sigmoid()).log(), linear=linear)
    found = amp.debug.suggest_fp32(model, torch.randn(16, 8))
    assert found.verdict.startswith("Could not tell which modules need fp32 at O5")


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before(fails):
    model, x = rounding_cases.HEALTHY["conv net"](), torch.randn(4, 3, 16, 16)
    model(x).sum().backward()
    before, given = everything(model), x.clone()

    def loss_fn(output):
        if fails:
            raise ZeroDivisionError
        return output.float().square().mean()

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        amp.debug.suggest_fp32(model, x, loss_fn=loss_fn)
    assert same((everything(model), x), (before, given))
    assert live_sessions() == 0


def draws():
    """Draws from a generator of its own, which a copy of the module shares."""
    own = torch.Generator()
    linear = nn.Linear(4, 4)
    return Body(lambda self, x: self.linear(x) * torch.rand(x.shape, generator=own), linear=linear)


def with_nan():
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, torch.nan)
    return model


BAD_INPUT = [
    (list, {}, "got list as the model; it takes a torch.nn.Module"),
    (lambda: nn.Linear(4, 4).bfloat16(), {}, "'weight' is torch.bfloat16 on cpu"),
    (lambda: nn.Linear(4, 4), {"loss_fn": "mse"}, "got str as loss_fn; it takes a function"),
    (lambda: nn.Linear(4, 4), {"loss_fn": lambda output: output}, r"shape \(2, 4\)"),
    (draws, {}, "or differ between two runs"),
    (with_nan, {}, r"not finite.*trace_overflow\(model\)"),
    (
        lambda: amp.initialize(nn.Linear(4, 4), opt_level="O5", verbosity=0),
        {},
        r"which amp has prepared.*before amp\.initialize",
    ),
    (
        lambda: nn.Sequential(amp.initialize(nn.Linear(4, 4), opt_level="O5", verbosity=0)),
        {},
        "got Sequential, which amp has prepared",
    ),
]


@pytest.mark.parametrize(("make", "given", "message"), BAD_INPUT)
def test_bad_input_is_refused_with_a_reason(make, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        amp.debug.suggest_fp32(make(), torch.ones(2, 4), **given)


def test_a_module_that_does_not_run_in_16_bits_is_suggested():
    def attended(self, x):
        """Positions from a buffer in fp32, as in models of transformers."""
        positions = torch.arange(4)[:, None].to(torch.float32)
        cos = (positions * self.inv_freq.float()).cos()
        query, key, value = self.projection(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query * cos, key * cos, value)

    torch.manual_seed(0)
    attention = Body(attended, projection=nn.Linear(8, 24))
    attention.register_buffer("inv_freq", torch.arange(1.0, 9.0), persistent=False)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(attention, nn.Linear(8, 2)))
    found = amp.debug.suggest_fp32(model, torch.randn(2, 4, 8))
    assert found.modules == ["1.0"]
    assert "fp32_modules=['1.0']" in str(found)
    assert found.notes == ("1.0 does not run in 16 bits.",)
