"""``suggest_fp32`` names the planted module and nothing else, and leaves everything as it was."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from tests.debug.rounding_cases import (
    FAULTS,
    HEALTHY,
    Around,
    CancelsBackward,
    Rotary,
    Shift,
    batch,
    cross_entropy,
)
from tests.support.steps import live_sessions

PLANTED = ("shift", "rotary", "sum", "average", "backward")


def suggested(model, length=24):
    inputs, targets = batch(model, length)
    return amp.debug.suggest_fp32(
        model,
        inputs,
        loss_fn=lambda output: cross_entropy(output, targets),
    )


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_module_is_found_and_nothing_else(fault):
    torch.manual_seed(0)
    faulty, length, _, _ = FAULTS[fault]
    found = suggested(Around(faulty()), length)
    assert found.modules == ["faulty"]
    assert found.error_after < found.error_before
    assert found.notes == ()
    assert "faulty" in str(found)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_needs_none(name):
    torch.manual_seed(1)
    found = suggested(HEALTHY[name]())
    assert found.modules == []
    assert found.error_before == found.error_after > 0.0
    assert found.setting == ""


class Two(nn.Module):
    """Two faults, one of them twice, among healthy modules."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(65, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), kind(), nn.LayerNorm(32))
            for kind in (Shift, nn.Tanh, Shift, CancelsBackward)
        )
        self.head = nn.Linear(32, 65)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_several_faults_are_all_found():
    torch.manual_seed(0)
    assert sorted(suggested(Two()).modules) == ["blocks.0.1", "blocks.2.1", "blocks.3.1"]


def test_the_suggestion_is_what_initialize_takes():
    torch.manual_seed(0)
    model = Around(Rotary())
    inputs, _ = batch(model, 400)
    found = suggested(model, 400)
    model = amp.initialize(model, opt_level="O5", verbosity=0, fp32_modules=found.modules)
    with amp.debug.trace_rounding(model) as trace:
        model(inputs).square().mean().backward()
    assert trace.worst is None


def test_a_model_that_is_nan_in_fp32_is_refused():
    with pytest.raises(ValueError, match=r"not finite in fp32, too.*trace_overflow\(model\)"):
        amp.debug.suggest_fp32(
            nn.Sequential(nn.Linear(4, 4), nn.Hardtanh()), torch.full((2, 4), torch.nan)
        )


def test_a_fault_outside_of_modules_is_noted():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return (self.linear(x) + 1000) - 1000

    torch.manual_seed(0)
    found = amp.debug.suggest_fp32(Outside(), torch.randn(16, 8))
    assert found.modules == []
    (note,) = found.notes
    assert note.startswith("aten.sub in the model loses digits")


# -- what is left behind -----------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before(fails):
    torch.manual_seed(0)
    model = HEALTHY["conv net"]()
    model(torch.randn(4, 3, 16, 16)).sum().backward()
    before = copy.deepcopy(model)
    x = torch.randn(4, 3, 16, 16)
    given, state = x.clone(), torch.get_rng_state()
    hooks = [dict(each._forward_hooks) for each in model.modules()]

    def loss_fn(output):
        if fails:
            raise ZeroDivisionError
        return output.float().square().mean()

    try:
        amp.debug.suggest_fp32(model, x, loss_fn=loss_fn)
    except ZeroDivisionError:
        assert fails
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, given)
    assert [dict(each._forward_hooks) for each in model.modules()] == hooks
    for now, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, old)
        assert now.grad is not None
    for now, old in zip(model.buffers(), before.buffers(), strict=True):
        assert torch.equal(now, old)
    assert live_sessions() == 0
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


# -- bad input -----------------------------------------------------------------------------------


class Draws(nn.Module):
    """Draws from a generator of its own, which a copy of the module shares."""

    generator = torch.Generator()

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * torch.rand(x.shape, generator=self.generator)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise NotImplementedError("no copies")


@pytest.mark.parametrize(
    ("model", "keywords", "error", "message"),
    [
        ([], {}, TypeError, "got list as the model; it takes a torch.nn.Module"),
        (nn.Linear(4, 4).bfloat16(), {}, ValueError, "'weight' is torch.bfloat16 on cpu"),
        (nn.Linear(4, 4), {"loss_fn": "mse"}, TypeError, "got str as loss_fn; it takes a function"),
        (nn.Linear(4, 4), {"loss_fn": lambda output: 1.0}, TypeError, "loss_fn returned float"),
        (nn.Linear(4, 4), {"loss_fn": lambda output: output}, ValueError, r"shape \(2, 4\)"),
        (Draws(), {}, ValueError, "between two runs in fp32"),
        (Uncopyable(4, 4), {}, TypeError, "cannot be copied .NotImplementedError: no copies"),
    ],
)
def test_bad_input_is_refused_with_a_reason(model, keywords, error, message):
    with pytest.raises(error, match=message):
        amp.debug.suggest_fp32(model, torch.ones(2, 4), **keywords)
    assert live_sessions() == 0


def test_a_prepared_model_and_missing_inputs_are_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="no tensor among the inputs of Linear"):
        amp.debug.suggest_fp32(model)
    model = amp.initialize(model, opt_level="O5", verbosity=0)
    with pytest.raises(ValueError, match=r"which amp has prepared.*before amp\.initialize"):
        amp.debug.suggest_fp32(model, torch.ones(2, 4))
