"""A prepared model with fp32 weights that is prepared again, as for a second fit or a test run."""

import gc

import pytest
import torch

from apex import amp
from tests.amp.cases import Final, TwoLayers

fp32_levels = pytest.mark.parametrize("level", ["O0", "O1", "O4"])

COMPUTED = {"O0": torch.float32, "O1": torch.float16, "O4": torch.bfloat16}


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def prepare(model, optimizer=None, level="O1", **options):
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def train(model, *optimizers, steps=3):
    x = torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(steps):
        loss = model(x).float().square().mean()
        with amp.scale_loss(loss, [*optimizers]) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@fp32_levels
def test_a_second_fit_trains_as_after_restore(level):
    torch.manual_seed(0)
    model, twin = TwoLayers(), TwoLayers()
    twin.load_state_dict(model.state_dict())
    wanted = []
    for _ in range(2):
        twin, optimizer = prepare(twin, adam(twin), level, loss_scale=8.0)
        wanted.append(train(twin, optimizer))
        amp.restore(twin, optimizer)
    for expected in wanted:
        model, optimizer = prepare(model, adam(model), level, loss_scale=8.0)
        assert model(torch.ones(1, 3)).dtype is COMPUTED[level]
        torch.testing.assert_close(train(model, optimizer), expected, rtol=0, atol=0)


@fp32_levels
def test_the_first_optimizer_goes_with_its_scale(level):
    model = TwoLayers()
    model, optimizer = prepare(model, adam(model), level, loss_scale=8.0)
    model, optimizer = prepare(model, adam(model), level, loss_scale=4.0)
    gc.collect()
    (state,) = amp.state_dict().values()
    assert state["loss_scale"] == 4.0
    amp.restore(model, optimizer)
    assert type(model) is TwoLayers
    assert model(torch.ones(1, 3)).dtype is torch.float32
    assert not amp.state_dict()


@fp32_levels
def test_optimizers_of_both_calls_step(level):
    model = TwoLayers()
    model, first = prepare(model, torch.optim.SGD(model.first.parameters(), lr=0.5), level)
    model, last = prepare(model, torch.optim.SGD(model.last.parameters(), lr=0.5), level)
    before = [param.detach().clone() for param in model.parameters()]
    after = train(model, first, last, steps=8)
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@fp32_levels
def test_it_may_be_prepared_without_an_optimizer_between_steps(level):
    model = TwoLayers()
    model, optimizer = prepare(model, adam(model), level, loss_scale=8.0)
    train(model, optimizer)
    model = prepare(model, level=level)
    with torch.no_grad():
        assert model(torch.ones(1, 3)).dtype is COMPUTED[level]
    before = [param.detach().clone() for param in model.parameters()]
    assert not any(map(torch.equal, before, train(model, optimizer)))


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("then", ["O0", "O1", "O4"])
def test_the_level_of_the_last_call_counts(level, then):
    model = prepare(TwoLayers(), level=level)
    model = prepare(model, level=then)
    assert model(torch.ones(1, 3)).dtype is COMPUTED[then]
    model = amp.restore(model)
    assert model(torch.ones(1, 3)).dtype is torch.float32


@fp32_levels
def test_an_error_leaves_the_model_as_the_first_call_prepared_it(level):
    model = TwoLayers()
    model, optimizer = prepare(model, adam(model), level, loss_scale=8.0)
    kind = type(model)
    with pytest.raises(TypeError, match="Final is final"):
        prepare(model, Final(model.parameters(), lr=0.1), level)
    assert type(model) is kind
    assert model(torch.ones(1, 3)).dtype is COMPUTED[level]
    train(model, optimizer)
    amp.restore(model, optimizer)
